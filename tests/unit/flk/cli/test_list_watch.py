"""`flk list --watch` and `flk status --watch`: lines for changes, the renewed screen, outages, and how they end."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest

from flk.cli.data_output import DataOutput
from flk.cli.list_watch import watch_list
from flk.errors import ApiError, UnreachableError
from flk.jobs.listing import ListedJob
from tests.support.api_server import JOBS
from tests.support.commands import Run
from tests.unit.flk.cli.outputs import jobs


class Client:
    def now(self) -> float:
        return jobs.NOW


def watched(*lists: Sequence[Any], form: str = "text", everywhere: bool = False) -> None:
    """Watch lists of jobs; an exception is raised in the place of one. Ctrl-C ends it."""
    remaining, now = list(lists), [0.0]

    def read() -> list[ListedJob]:
        if not remaining:
            raise KeyboardInterrupt
        listed: Any = remaining.pop(0)
        if isinstance(listed, Exception):
            raise listed
        return [ListedJob(job.seen(), job.state()) for job in listed]

    def sleep(pause: float) -> None:
        now[0] += pause

    client: Any = Client()
    with pytest.raises(KeyboardInterrupt):
        watch_list(
            client,
            read,
            DataOutput.parse(form),
            all_namespaces=everywhere,
            nothing="there are no jobs in namespace team",
            sleep=sleep,
            clock=lambda: now[0],
        )


def test_a_line_for_each_change(capsys: Any) -> None:
    down: Any = UnreachableError("the API server does not answer")
    bert, gpt = jobs.new(name="bert").all("pod", "Pending", node=""), jobs.new().all("pod", "Pending", node="")
    watched([], [bert], [bert, gpt], down, down, [jobs.succeeded("bert"), jobs.running("gpt")], [jobs.running("gpt")])
    printed = capsys.readouterr()
    assert printed.out.splitlines() == [
        "bert is pending, 0 of 3 pods are running",
        "gpt is pending, 0 of 3 pods are running",
        "bert is succeeded",
        "gpt is running, 3 of 3 pods",
        "bert is not in the list any more",
    ]
    assert printed.err.splitlines() == [
        "flk: there are no jobs in namespace team",
        "flk: the API server does not answer; the list is as it was before",
    ]


def test_in_all_namespaces_and_as_json(capsys: Any) -> None:
    watched([jobs.running("gpt")], [jobs.running("gpt")], [], everywhere=True)
    assert capsys.readouterr().out.splitlines() == [
        "team/gpt is running, 3 of 3 pods",
        "team/gpt is not in the list any more",
    ]
    watched([jobs.running("gpt")], [jobs.running("gpt")], [], form="json")
    first, last = map(json.loads, capsys.readouterr().out.splitlines())
    assert (first["phase"], last["name"], last["listed"]) == ("Running", "gpt", False)


def test_a_terminal_is_renewed(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "60")
    watched([jobs.running("gpt")], [], form="wide")
    shown = capsys.readouterr().out
    assert shown.split("\x1b[J")[1] == "there are no jobs in namespace team\n"
    assert shown.startswith("NAME   PHASE     PODS   AGE   OWNER        REASON\ngpt    Running   3/3")


@pytest.mark.parametrize("status", [429, 500, 503])
def test_an_overload_ends_nothing(capsys: Any, status: int) -> None:
    full: Any = ApiError("the API server is overloaded", status=status)
    refused: Any = ApiError("no such resource", status=400)
    watched([jobs.running("gpt")], full, [jobs.running("gpt")])
    assert "the API server is overloaded; the list is as it was before" in capsys.readouterr().err
    with pytest.raises(ApiError):
        watched([], refused)


def test_a_server_that_never_answers_ends_it(capsys: Any) -> None:
    down: Any = UnreachableError("the API server does not answer")
    with pytest.raises(UnreachableError):
        watched(down)
    with pytest.raises(UnreachableError):
        watched([], *[down] * 200)


@pytest.mark.parametrize(
    ("words", "option"),
    [("-o yaml", "--output yaml"), ("-o name", "--output name"), ("-o json --raw", "--raw")],
)
@pytest.mark.parametrize("command", ["list", "status gpt"])
def test_what_cannot_be_watched(run: Run, command: str, words: str, option: str) -> None:
    code, _, stderr = run(*command.split(), "--watch", *words.split())
    assert (code, stderr) == (2, f"error: --watch and {option} exclude each other\n")


@pytest.mark.parametrize("command", ["list", "status gpt"])
def test_ctrl_c_ends_a_watch(fake: Any, run: Run, monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("flk.cli.list_watch.watch_list", interrupt)
    monkeypatch.setattr("flk.jobs.wait.follow_states", interrupt)
    assert run(*command.split(), "--watch") == (130, "", "")


def test_the_status_of_a_job_is_watched_until_it_ends(fake: Any, run: Run) -> None:
    jobs.add(fake, "succeeded")
    assert run("status", "gpt", "--watch") == (0, "gpt is succeeded\n", "")
    fake.objects[JOBS].clear()
    code, stdout, stderr = run("status", "gpt", "--watch")
    assert (code, stdout) == (0, "gpt is succeeded\n")
    assert "job gpt is gone; this is the last answer about it" in stderr
    assert run("status", "nowhere", "--watch")[0] == 102
