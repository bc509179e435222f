from typing import Any

import pytest

from flk.errors import MissingApiError
from flk.kube import ApiClient, RequestTarget, Resource
from flk.kube.credentials import connect
from tests.support.api_server import FakeApiServer

JOBSETS = Resource("jobset.x-k8s.io", "v1alpha2", "jobsets", jobs="JobSets", install="install JobSet")
QUEUES = Resource("kueue.x-k8s.io", "v1beta2", "localqueues", others=("v1beta1",))
GROUPS = Resource("scheduling.k8s.io", "v1beta1", "podgroups", others=("v1alpha3", "v1alpha2"))

# As an API server of Kubernetes 1.34 with JobSet answers.
RECORDED = {
    "/apis/jobset.x-k8s.io": {
        "kind": "APIGroup",
        "apiVersion": "v1",
        "name": "jobset.x-k8s.io",
        "versions": [{"groupVersion": "jobset.x-k8s.io/v1alpha2", "version": "v1alpha2"}],
        "preferredVersion": {"groupVersion": "jobset.x-k8s.io/v1alpha2", "version": "v1alpha2"},
    },
    "/apis/jobset.x-k8s.io/v1alpha2": {
        "kind": "APIResourceList",
        "apiVersion": "v1",
        "groupVersion": "jobset.x-k8s.io/v1alpha2",
        "resources": [
            {"name": "jobsets", "singularName": "jobset", "namespaced": True, "kind": "JobSet", "verbs": ["get"]},
            {"name": "jobsets/status", "singularName": "", "namespaced": True, "kind": "JobSet", "verbs": ["get"]},
        ],
    },
    "/apis/scheduling.k8s.io": {
        "kind": "APIGroup",
        "apiVersion": "v1",
        "name": "scheduling.k8s.io",
        "versions": [{"groupVersion": "scheduling.k8s.io/v1", "version": "v1"}],
        "preferredVersion": {"groupVersion": "scheduling.k8s.io/v1", "version": "v1"},
    },
    "/apis/scheduling.k8s.io/v1": {
        "kind": "APIResourceList",
        "apiVersion": "v1",
        "groupVersion": "scheduling.k8s.io/v1",
        "resources": [{"name": "priorityclasses", "namespaced": False, "kind": "PriorityClass", "verbs": ["get"]}],
    },
}


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


def test_the_version_is_looked_up_once_and_only_if_the_first_one_is_not_served(
    fake: FakeApiServer, client: ApiClient
) -> None:
    fake.objects |= {collection(QUEUES, "v1beta1"): {}, collection(GROUPS, "v1beta1"): {}}
    for _ in range(3):
        client.list_all(RequestTarget(GROUPS, "team"))
        client.list_all(RequestTarget(QUEUES, "team"))
    documents = [path for path in fake.asked("GET") if "/namespaces/" not in path]
    assert documents == ["/apis/kueue.x-k8s.io", "/apis/kueue.x-k8s.io/v1beta1"]


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
    fake.documents |= RECORDED
    assert client.served(JOBSETS) == JOBSETS
    with pytest.raises(MissingApiError, match=r"does not serve podgroups.scheduling.k8s.io"):
        client.served(GROUPS)
    # Of its own groups the API server knows that they have no such kind.
    where = RequestTarget(GROUPS, "team")
    fake.fail(404, fake.status(404, "the server could not find the requested resource"))
    with pytest.raises(MissingApiError, match=r"does not serve podgroups.scheduling.k8s.io"):
        client.list_all(where)


def test_where_the_versions_may_not_be_read_the_first_error_counts(fake: FakeApiServer, client: ApiClient) -> None:
    fake.refused["/apis/jobset.x-k8s.io"] = (403, 'User "ada" cannot get path "/apis/jobset.x-k8s.io"')
    with pytest.raises(MissingApiError, match=r"does not serve JobSets \(API jobset.x-k8s.io/v1alpha2\)"):
        client.list_all(RequestTarget(JOBSETS, "team"))


def test_a_kind_that_discovery_names_is_asked_for_again(fake: FakeApiServer, client: ApiClient) -> None:
    """As of an API server that has just started, which knows its own kinds before those of definitions."""
    fake.objects[collection(JOBSETS, "v1alpha2")] = {"gpt": {"metadata": {"name": "gpt"}}}
    fake.fail(404, b"404 page not found\n")
    assert [each["metadata"]["name"] for each in client.list_all(RequestTarget(JOBSETS, "team"))[0]] == ["gpt"]
