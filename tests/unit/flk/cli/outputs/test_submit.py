"""`flk submit`: mistakes that end before anything is created, and what a submission prints."""

from __future__ import annotations

from pathlib import Path

import pytest
from syrupy.assertion import SnapshotAssertion

from flk import cli
from tests.support.api_server import JOBS, MAPS, FakeApiServer, failure
from tests.unit.flk.cli.outputs import jobs, usage
from tests.unit.flk.cli.outputs.conftest import Terminal

OWN_OPTIONS = ["--output xml"]
WRONG_OPTIONS = [*usage.JOB_OPTIONS, *usage.CLUSTER_OPTIONS, *OWN_OPTIONS]


@pytest.mark.parametrize("options", WRONG_OPTIONS)
def test_wrong_option(terminal: Terminal, fake: FakeApiServer, snapshot: SnapshotAssertion, options: str) -> None:
    script = "" if options.startswith("--module") else "train.py "
    assert terminal(f"flk submit {script}{options}") == snapshot
    assert fake.asked("POST") == []


def test_every_option_with_a_value_is_here_with_a_wrong_one() -> None:
    wrong = {word for options in WRONG_OPTIONS for word in options.split() if word.startswith("--")}
    known = {p.opts[0] for p in cli.load("submit").params if p.param_type_name == "option" and not p.is_flag}
    assert known - {"--help", "--as"} <= wrong  # any text may be the name of a user


@pytest.mark.parametrize("mistake", usage.JOB_FILES)
def test_wrong_job_file(terminal: Terminal, fake: FakeApiServer, snapshot: SnapshotAssertion, mistake: str) -> None:
    terminal.write({"flk.yaml": usage.JOB_FILES[mistake]})
    assert terminal("flk submit") == snapshot
    assert fake.asked("POST") == []


@pytest.mark.parametrize("line", ["flk submit nope.py", "flk submit ../train.py", "flk submit ."])
def test_missing_script(terminal: Terminal, fake: FakeApiServer, snapshot: SnapshotAssertion, line: str) -> None:
    assert terminal(line) == snapshot
    assert fake.requests == []


def test_code_that_is_too_large(
    terminal: Terminal, fake: FakeApiServer, snapshot: SnapshotAssertion, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flk.manifest.bundle.SIZE_LIMIT", 10)
    assert terminal("flk submit train.py") == snapshot
    assert fake.asked("POST") == []


@pytest.mark.parametrize(
    "line",
    [
        "flk submit train.py --name gpt",
        "flk submit train.py --name gpt --replicas 4 --gpu 8 --image pytorch/pytorch:2.9.0",
        "flk submit train.py --name gpt --checkpoint data:/ckpt --env HF_TOKEN=x",
        "flk submit train.py --name gpt --no-ship",
        "flk submit train.py --name gpt --dry-run -n other",
        "flk submit train.py",
        "flk submit -m train",
        "flk submit -m in_image --name gpt",
    ],
)
def test_created(terminal: Terminal, snapshot: SnapshotAssertion, line: str) -> None:
    assert terminal(line) == snapshot


def test_job_file(terminal: Terminal, snapshot: SnapshotAssertion) -> None:
    terminal.write({"flk.yaml": "command: train.py --lr 0.1\nname: gpt\nreplicas: 2\n"})
    assert terminal("flk submit") == snapshot


def test_name_is_taken(terminal: Terminal, fake: FakeApiServer, snapshot: SnapshotAssertion) -> None:
    jobs.add(fake, "running")
    assert terminal("flk submit train.py --name gpt") == snapshot
    assert list(fake.objects[MAPS]) == []


def test_name_is_still_being_deleted(terminal: Terminal, fake: FakeApiServer, snapshot: SnapshotAssertion) -> None:
    jobs.add(fake, "being deleted")
    assert terminal("flk submit train.py --name gpt") == snapshot


REFUSALS = {
    "no permission": (
        403,
        failure(403, 'pytorchjobs is forbidden: User "ada" cannot create resource "pytorchjobs" in namespace "team"'),
    ),
    "no namespace": (404, failure(404, 'namespaces "team" not found', kind="namespaces", name="team")),
    "webhook": (400, failure(400, 'admission webhook "validator.kubeflow.org" denied the request: no GPUs here')),
    "invalid": (
        422,
        failure(422, 'PyTorchJob "gpt" is invalid', causes=[{"field": "spec.runPolicy", "message": "Required value"}]),
    ),
}


@pytest.mark.parametrize("what", REFUSALS)
def test_refused(terminal: Terminal, fake: FakeApiServer, snapshot: SnapshotAssertion, what: str) -> None:
    fake.faults.append(None)  # the request for the defaults of the namespace
    fake.fail(*REFUSALS[what])
    assert terminal("flk submit train.py --name gpt") == snapshot


def test_cluster_without_pytorchjobs(terminal: Terminal, fake: FakeApiServer, snapshot: SnapshotAssertion) -> None:
    del fake.objects[JOBS]
    assert terminal("flk submit train.py --name gpt --target pytorchjob") == snapshot


@pytest.mark.parametrize("end", ["succeeded", "exception on rank 1"])
def test_follow(terminal: Terminal, fake: FakeApiServer, snapshot: SnapshotAssertion, end: str) -> None:
    def run(item: dict[str, object]) -> None:
        """The operator and the kubelet, at once: the job has ended when it is created."""
        if item["kind"] == "PyTorchJob":
            fake.created = lambda item: None
            uid = item["metadata"]["uid"]
            builder = jobs.JOBS[end]()
            item["status"] = builder.job["status"]
            for index, pod in builder.pods.items():
                pod["metadata"]["ownerReferences"][0]["uid"] = uid
                fake.add("pods", pod)
                fake.written[pod["metadata"]["name"]] = jobs.log_of(index)

    fake.created = run
    transcript = terminal("flk submit train.py --name gpt --replicas 3 --follow")
    assert in_order_of_ranks(transcript) == snapshot


def in_order_of_ranks(transcript: str) -> str:
    """The transcript with the lines of ranks sorted by rank; pods are read side by side, so their order varies."""
    lines = transcript.splitlines()
    where = [number for number, line in enumerate(lines) if line.startswith("[rank ")]
    for number, line in zip(where, sorted((lines[n] for n in where), key=lambda line: line[:8]), strict=True):
        lines[number] = line
    return "\n".join(lines)


def test_example_trains_where_nothing_is(
    terminal: Terminal, snapshot: SnapshotAssertion, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    example = tmp_path / "examples" / "gpt"
    example.mkdir(parents=True)
    (example / "train.py").touch()
    monkeypatch.setattr("flk.spec.overlay.EXAMPLE", example)
    (terminal.folder / "train.py").unlink()
    assert terminal("flk submit --name gpt --replicas 4") == snapshot
