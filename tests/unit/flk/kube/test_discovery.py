import base64
from pathlib import Path
from typing import Any

import pytest

from flk.errors import MissingApiError
from flk.kube import ApiClient, Document, RequestTarget, Resource
from flk.kube.connection import cluster_key
from flk.kube.credentials import connect
from flk.kube.kubeconfig import Context
from tests.support.api_server import FakeApiServer

JOBSETS = Resource("jobset.x-k8s.io", "v1alpha2", "jobsets", jobs="JobSets", install="install JobSet")
QUEUES = Resource("kueue.x-k8s.io", "v1beta2", "localqueues", others=("v1beta1",))
GROUPS = Resource("scheduling.k8s.io", "v1beta1", "podgroups", others=("v1alpha3", "v1alpha2"))


@pytest.fixture
def client(fake: FakeApiServer, kubeconfig: Any) -> ApiClient:
    return ApiClient(connect())


def collection(resource: Resource, version: str) -> str:
    return f"/apis/{resource.group}/{version}/namespaces/team/{resource.plural}"


@pytest.mark.parametrize("version", ["v1beta2", "v1beta1"])
def test_a_kind_is_used_in_the_version_that_the_cluster_serves(
    fake: FakeApiServer, client: ApiClient, version: str
) -> None:
    path = collection(QUEUES, version)
    fake.objects[path] = {"gold": {"metadata": {"name": "gold"}}}
    where = RequestTarget(QUEUES, "team")
    assert [queue["metadata"]["name"] for queue in client.list_all(where)[0]] == ["gold"]
    assert client.call("get", RequestTarget(QUEUES, "team", "gold"))["metadata"]["name"] == "gold"
    assert client.served(QUEUES).version == version


def test_discovery_is_asked_once_and_kept_for_the_next_command(
    fake: FakeApiServer, client: ApiClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake.objects |= {collection(QUEUES, "v1beta1"): {}, collection(GROUPS, "v1beta1"): {}}
    for _ in range(3):
        assert client.serves(QUEUES)
        assert not client.serves(JOBSETS)
        client.list_all(RequestTarget(GROUPS, "team"))
        client.list_all(RequestTarget(QUEUES, "team"))
    assert fake.asked("GET").count("/apis") == 1
    another = ApiClient(connect())
    assert not another.serves(JOBSETS)
    another.list_all(RequestTarget(QUEUES, "team"))  # in its version, without a first request that is refused
    assert fake.asked("GET").count("/apis") == 1
    assert collection(QUEUES, "v1beta2") not in fake.asked("GET")
    monkeypatch.setattr("flk.kube.discovery.KEPT", -1.0)
    assert not ApiClient(connect()).serves(JOBSETS)
    assert fake.asked("GET").count("/apis") == 2


def test_requests_of_a_kind_that_is_not_there_ask_for_all_kinds_once(fake: FakeApiServer, client: ApiClient) -> None:
    for _ in range(3):
        with pytest.raises(MissingApiError):
            client.list_all(RequestTarget(JOBSETS, "team"))
    assert fake.asked("GET").count("/apis") == 1


def test_a_kind_that_was_just_installed_is_found_when_it_is_needed(fake: FakeApiServer, client: ApiClient) -> None:
    assert not client.serves(JOBSETS)
    fake.objects[collection(JOBSETS, "v1alpha2")] = {}
    assert ApiClient(connect()).served(JOBSETS) == JOBSETS


@pytest.mark.parametrize("key", ["certificate-authority-data", "certificate-authority", "proxy-url", "tls-server-name"])
def test_another_cluster_at_the_same_address_has_another_key(tmp_path: Path, key: str) -> None:
    authority = tmp_path / "ca.crt"
    keys = set()
    for text in (b"old", b"new"):
        authority.write_bytes(text)
        value = {
            "certificate-authority-data": base64.b64encode(text).decode(),
            "certificate-authority": str(authority),
        }.get(key, text.decode())
        cluster = {"server": "https://127.0.0.1:6443", key: value}
        keys.add(cluster_key(Context("kind", "team", cluster, {})))
    assert len(keys) == 2


@pytest.mark.parametrize("content", [b"", b"junk", b"[]", b'{"time": 1e12, "groups": 5}', b'{"groups": {}}'])
def test_a_damaged_file_counts_as_none(fake: FakeApiServer, client: ApiClient, content: bytes) -> None:
    fake.objects[collection(JOBSETS, "v1alpha2")] = {}
    path = client._discovery._path
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    assert client.serves(JOBSETS)


def test_an_object_is_created_in_the_version_that_the_cluster_serves(fake: FakeApiServer, client: ApiClient) -> None:
    path = collection(GROUPS, "v1alpha2")
    fake.objects[path] = {}
    group = {"apiVersion": "scheduling.k8s.io/v1beta1", "kind": "PodGroup", "metadata": {"name": "gpt"}}
    for _ in range(2):
        client.call("create", RequestTarget(GROUPS, "team"), body=group)
        assert fake.objects[path].pop("gpt")["apiVersion"] == "scheduling.k8s.io/v1alpha2"


def test_a_version_that_flk_does_not_know_is_refused_by_name(fake: FakeApiServer, client: ApiClient) -> None:
    fake.objects[collection(JOBSETS, "v1")] = {}
    with pytest.raises(MissingApiError, match=r"serves jobsets.jobset.x-k8s.io in version v1 only, .* knows v1alpha2"):
        client.call("create", RequestTarget(JOBSETS, "team"), body={})
    with pytest.raises(MissingApiError, match=r"in version v1 only") as refused:
        client.served(JOBSETS)
    assert refused.value.hint == "use a version of flk that is as new as the cluster's"
    assert fake.objects[collection(JOBSETS, "v1")] == {}


def test_a_group_that_has_other_kinds_does_not_serve_this_one(fake: FakeApiServer, client: ApiClient) -> None:
    fake.objects[f"/apis/{GROUPS.group}/v1beta1/priorityclasses"] = {}
    with pytest.raises(MissingApiError, match=r"does not serve podgroups.scheduling.k8s.io"):
        client.served(GROUPS)
    # Of its own groups the API server knows that they have no such kind.
    fake.fail(404, fake.status(404, "the server could not find the requested resource"))
    with pytest.raises(MissingApiError, match=r"does not serve podgroups.scheduling.k8s.io"):
        client.list_all(RequestTarget(GROUPS, "team"))


@pytest.mark.parametrize(
    ("answers", "answer"),
    [("refused", (403, 'User "ada" cannot get path "/apis"')), ("documents", b"<html>from a proxy</html>")],
)
def test_where_discovery_may_not_be_read_every_kind_is_asked_for_once(
    fake: FakeApiServer, kubeconfig: Any, answers: str, answer: Any
) -> None:
    getattr(fake, answers)["/apis"] = answer
    pauses: list[float] = []
    client = ApiClient(connect(), sleep=pauses.append)
    assert client.serves(JOBSETS)
    with pytest.raises(MissingApiError, match=r"does not serve JobSets \(API jobset.x-k8s.io/v1alpha2\)"):
        client.list_all(RequestTarget(JOBSETS, "team"))
    assert (pauses, fake.asked("GET").count(collection(JOBSETS, "v1alpha2"))) == ([], 1)


def test_a_kind_that_discovery_names_is_asked_for_again_after_a_pause(fake: FakeApiServer, kubeconfig: Any) -> None:
    fake.objects[collection(JOBSETS, "v1alpha2")] = {}
    pauses: list[float] = []
    client = ApiClient(connect(), sleep=pauses.append)
    fake.fail(404, b"404 page not found")  # the API server reads the definition of the kind anew
    assert client.list_all(RequestTarget(JOBSETS, "team"))[0] == []
    assert pauses == [client.retries.backoffs[0]]


def test_a_document_that_is_not_there_is_not_looked_for_among_the_kinds(fake: FakeApiServer, client: ApiClient) -> None:
    with pytest.raises(MissingApiError):
        client.call("get", Document(Resource("karpenter.sh", "v1", ""), document="/apis/karpenter.sh"))
    assert fake.asked("GET") == ["/apis/karpenter.sh"]
