"""A list of many jobs interprets and copies each of them once: the time that it takes grows with that."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from flk.jobs import archive_writer
from flk.observe import pods
from flk.observe.view import JobView
from flk_runtime.contract.user_env import TOPOLOGY, ZONE
from tests.support.api_server import FakeApiServer
from tests.support.jobs import JobBuilder

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often functions were called that take time for each job."""
    found: Counter[str] = Counter()
    for where, name in ((JobView, "__init__"), (archive_writer, "kept_job"), (pods, "_variables")):
        before = getattr(where, name)

        def call(*args: Any, name: str = name, before: Callable[..., Any] = before) -> Any:
            found[name] += 1
            return before(*args)

        monkeypatch.setattr(where, name, call)
    return found


def test_each_job_of_a_list_is_interpreted_and_copied_once(
    fake: FakeApiServer, run: Run, counted: Counter[str]
) -> None:
    for number in range(5):
        JobBuilder(2, name=f"runs-{number}").all("pod").condition("Running").add_to(fake)
    code, stdout, _ = run("list")
    assert (code, stdout.count("Running")) == (0, 5)
    assert counted == {"__init__": 5, "kept_job": 5}  # no pod says where it is in the network
    assert len(fake.requests) < 10


def test_a_job_of_a_list_that_needs_its_events_is_interpreted_again_with_them(
    fake: FakeApiServer, run: Run, counted: Counter[str]
) -> None:
    for number in range(5):
        builder = JobBuilder(2, name=f"waits-{number}")
        builder.job["spec"]["runPolicy"]["suspend"] = True
        builder.add_to(fake)
    code, stdout, _ = run("list")
    assert (code, stdout.count("Suspended")) == (0, 10)  # phase and reason
    assert counted == {"__init__": 10, "kept_job": 5}


@pytest.mark.parametrize("status", [200, 403])
def test_no_garbage_is_collected_while_a_list_is_read(
    fake: FakeApiServer, run: Run, monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    enabled: list[bool] = []

    def look(_: object) -> None:
        enabled.append(gc.isenabled())

    monkeypatch.setattr(fake, "heard", look)
    if status != 200:
        fake.refused["/apis/kubeflow.org/v1/namespaces/team/pytorchjobs"] = (status, "forbidden")
    run("list")
    assert (gc.isenabled(), set(enabled[:1])) == (True, {False})


def test_the_variables_of_a_pod_are_read_if_one_says_where_it_is_in_the_network() -> None:
    job = JobBuilder(1)
    job.container["env"] = [{"name": "RACK", "value": "r7"}, {"name": TOPOLOGY, "value": "$(RACK)/1"}]
    assert job.pod(0).view().pods[0].topology == "r7/1"


def test_a_pod_that_says_nothing_more_is_in_the_zone_that_its_label_names() -> None:
    job = JobBuilder(1)
    job.container["env"] = [{"name": ZONE}]
    job.pod(0)
    assert job.view().pods[0].topology == ""
    job.pods[0]["metadata"]["labels"]["topology.kubernetes.io/zone"] = "a"
    assert job.view().pods[0].topology == "a"
