"""Submitting, looking, following and deleting in a real cluster."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from tests.support.commands import WITHOUT_TORCH, status

SMALL = ["--cpu", "50m", "--restarts", "0", *WITHOUT_TORCH]
ENDLESS = "import time\nprint('begun', flush=True)\nwhile True:\n    time.sleep(0.5)\n    print('tick', flush=True)\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a train.py that ends at once and a forever.py that does not."""
    (tmp_path / "train.py").write_text("print('hello')\n")
    (tmp_path / "forever.py").write_text(ENDLESS)
    return tmp_path


def test_one_job_from_submit_to_delete(flk: Any, kubectl: Any, namespace: str, image: str, folder: Path) -> None:
    options = ["--image", image, *SMALL]
    made = flk(*("submit", "train.py", "--name", "one", "--replicas", "2"), *options, cwd=folder)
    assert (made.code, made.stdout) == (0, "one\n")
    for command in (f"flk logs one -n {namespace}", f"flk status one -n {namespace}", f"flk wait one -n {namespace}"):
        assert command in made.stderr
    assert "shipped 2 files" in made.stderr

    again = flk("submit", "train.py", "--name", "one", "--image", image, *SMALL, cwd=folder)
    assert again.code == 1
    assert f"there is a job one in namespace {namespace} already, created " in again.stderr
    assert f"ago by {status(flk, 'one')['owner']}" in again.stderr

    waited = flk("wait", "one")
    assert waited.code == 0, waited.stderr
    ended = status(flk, "one")
    assert (ended["phase"], ended["code"], ended["ready"]) == ("Succeeded", 0, 2)
    assert [attempt["outcome"] for attempt in ended["attempts"]] == ["succeeded"]
    lines = flk("logs", "one").stdout.splitlines()
    assert {"[rank 0] hello", "[rank 1] hello"} <= set(lines)
    assert sorted(flk("logs", "one", "--no-follow").stdout.splitlines()) == sorted(lines)
    assert flk("logs", "one", "--rank", "1").stdout == "[rank 1] hello\n"
    listed = flk("list")
    assert listed.code == 0, listed.stderr
    assert listed.stdout.splitlines()[1].split()[:3] == ["one", "Succeeded", "2/2"]

    gone = flk("delete", "one", "two")
    assert (gone.code, gone.stdout) == (102, "one\n")
    assert "there is no job two" in gone.stderr
    left = kubectl("get", "pytorchjobs,pods,services", "-o", "name")
    assert left == ""
    kubectl("wait", "--for=delete", "configmaps", "-l", "flk.dev/shared", "--timeout=60s")


def archives(kubectl: Any) -> dict[str, set[str]]:
    """The names of the jobs that own each archive of the namespace, by the archive's name."""
    return {
        item["metadata"]["name"]: {owner["name"] for owner in item["metadata"]["ownerReferences"]}
        for item in kubectl.json("get", "configmaps", "-l", "flk.dev/shared")["items"]
    }


@pytest.mark.promise("Clusters: Jobs share their code, and the last one takes it along")
def test_jobs_share_their_code_and_the_last_takes_it_along(
    flk: Any, kubectl: Any, image: str, folder: Path, eventually: Any
) -> None:
    for name in ("one", "two"):
        made = flk("submit", "forever.py", "--name", name, "--image", image, *SMALL, cwd=folder)
        assert made.code == 0, made.stderr
    shared = archives(kubectl)
    assert sorted(name.rpartition("-")[0].rpartition("-")[0] for name in shared) == ["flk-code", "flk-runtime"]
    assert set(map(frozenset, shared.values())) == {frozenset({"one", "two"})}

    assert flk("delete", "one").code == 0
    eventually(
        "the code belongs to the other job",
        lambda: set(map(frozenset, archives(kubectl).values())) == {frozenset({"two"})},
    )
    assert archives(kubectl).keys() == shared.keys()
    # A new pod mounts the code anew.
    eventually("it runs", lambda: "begun" in flk("logs", "two", "--no-follow").stdout)
    kubectl("delete", "pod", "two-worker-0", "--force")
    running = "jsonpath={.items[?(@.status.phase=='Running')].metadata.name}"
    eventually("its next pod runs", lambda: "two-worker-0" in kubectl("get", "pods", "-o", running))
    eventually("it has the code", lambda: kubectl("logs", "two-worker-0").count("begun") == 1)

    assert flk("delete", "two").code == 0
    eventually("the code is gone", lambda: archives(kubectl) == {})


@pytest.mark.promise("Causes: Ctrl-C leaves the job")
def test_ctrl_c_detaches_and_a_deleted_job_leaves_its_name(
    flk: Any, namespace: str, image: str, folder: Path, eventually: Any
) -> None:
    submitted = flk("submit", "forever.py", "--name", "long", "--image", image, *SMALL, cwd=folder)
    assert submitted.code == 0, submitted.stderr
    for command in (["logs", "-f", "long"], ["wait", "long"]):
        eventually("the job runs", lambda: status(flk, "long")["phase"] == "Running")
        process = flk.start(*command)
        stream = process.stdout if command[0] == "logs" else process.stderr
        while "tick" not in (line := stream.readline()) and "running" not in line:
            assert line, process.stderr.read()
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=30)
        assert process.returncode == 130
        assert f"flk {command[0]} long -n {namespace}" in err
        assert "Traceback" not in err
    assert status(flk, "long")["phase"] == "Running"

    assert flk("wait", "long", "--timeout", "0").code == 101
    assert flk("wait", "long", "--timeout", "2s").code == 124

    follower = flk.start("wait", "long")
    assert "running" in follower.stderr.readline()
    assert flk("delete", "long").code == 0
    assert follower.wait(timeout=60) == 103
    follower.communicate()

    # The name can be used again at once.
    second = flk("submit", "train.py", "--name", "long", "--image", image, *SMALL, cwd=folder)
    assert second.code == 0, second.stderr
    assert flk("wait", "long").code == 0
