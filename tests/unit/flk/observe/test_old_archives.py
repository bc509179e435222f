"""Jobs that version 48f0c36 has archived, in the state folder and in a ConfigMap, are read as its own are."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from flk import labels
from flk.observe.archive import LocalArchive
from flk.observe.client import JobClient
from flk_runtime.contract.exit_codes import ExitCode
from tests.support.api_server import FakeApiServer
from tests.support.commands import Run

FOLDER = Path(__file__).parent / "archived"


def on_this_machine(name: str) -> None:
    folder = LocalArchive(JobClient.connect()).folder
    folder.mkdir(parents=True)
    (folder / "gpt@uid-gpt.json.gz").write_bytes(gzip.compress((FOLDER / f"{name}.json").read_bytes()))


def in_config_map(fake: FakeApiServer) -> None:
    meta = {"name": "records", "labels": {labels.RECORDS: "true"}}
    fake.add("configmaps", {"metadata": meta, "data": {"gpt.uid-gpt": (FOLDER / "entry.json").read_text()}})


@pytest.mark.parametrize("place", ["on this machine", "in ConfigMap records"])
def test_a_job_that_failed(fake: FakeApiServer, run: Run, place: str) -> None:
    if place == "on this machine":
        on_this_machine("exception-on-rank-1")
    else:
        in_config_map(fake)
    code, text, notes = run("why", "gpt", "-o", "json")
    why = json.loads(text)
    assert code == 0
    assert (why["code"], why["place"]) == ("ExceptionRaised", place)
    assert "raised ValueError: expected 512 features, got 511" in why["summary"]
    assert f"job gpt is gone; this is what flk kept of it {place} " in notes
    state = json.loads(run("status", "gpt", "-o", "json")[1])
    assert (state["phase"], state["code"], state["failure"]["rank"]) == ("Failed", ExitCode.TRAINING, 1)
    assert [attempt["outcome"] for attempt in state["attempts"]] == ["failed"]
    code, lines, _ = run("logs", "gpt")
    assert code == ExitCode.TRAINING
    assert "step 20" in lines


def test_a_job_that_was_deleted_while_it_ran(fake: FakeApiServer, run: Run) -> None:
    on_this_machine("running")
    assert json.loads(run("why", "gpt", "-o", "json")[1])["code"] == "Deleted"
    assert json.loads(run("status", "gpt", "-o", "json")[1])["phase"] == "Deleted"


def test_nothing_is_made_up_of_a_job_of_which_only_a_record_is_left(fake: FakeApiServer, run: Run) -> None:
    """The record tells neither the kind of the job's object nor the names of its pods."""
    in_config_map(fake)
    state = json.loads(run("status", "gpt", "-o", "json")[1])
    assert (state["kind"], state["namespace"]) == ("", "team")
    assert [pod["name"] for pod in state["pods"]] == ["pod 0", "pod 1", "pod 2"]
    assert run("status", "gpt", "-o", "name")[1] == "gpt\n"
    assert "PyTorchJob" not in run("why", "gpt", "-o", "json")[1]
    line = json.loads(run("logs", "gpt", "-o", "json", "--pod", "0")[1])
    assert (line["pod"], line["message"]) == ("pod 0", "step 20")
