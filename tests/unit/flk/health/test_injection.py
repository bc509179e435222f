"""What others write (events, logs, exceptions, names of images) is printed and neither executed nor obeyed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from flk_runtime.contract.failure import Failure, Kind
from tests.support.commands import Run
from tests.support.jobs import NOW, JobBuilder, record

TEXTS = {
    "title": "\x1b]0;owned\x07after",
    "clear": "\x1b[2J\x1b[Hafter",
    "carriage return": "before\rafter",
    "direction": "\u202eafter\u2066",
    "device control": "\x1bP+q544e\x1b\\after",
    "shell": "$(touch /tmp/owned); `id` after",
    "variable": "$(HOME) ${HOME} after",
    "template": "{{ .Values.x }} {0} %s after",
    "yaml": "!!python/object/apply:os.system ['id'] after",
    "newline": "one\nerror: after",
    "nul": "a\x00after",
    "long": "x" * 5000 + " after",
}


def with_event(text: str) -> JobBuilder:
    return JobBuilder(2).pod(0).event("FailedCreatePod", f'pods "gpt-worker-1" is forbidden: {text}')


def with_exception(text: str) -> JobBuilder:
    failure = Failure(
        Kind.EXCEPTION, 1, 1, "gpt-worker-1", "node-a", 0, NOW - 30, "ValueError", text, f"Traceback\n{text}"
    )
    return JobBuilder(2).all("ended", 100, record(failure).to_json()).condition("Failed", text)


def with_message(text: str) -> JobBuilder:
    return JobBuilder(2).all("pod", "Pending", {"waiting": {"reason": "ErrImagePull", "message": text}})


@pytest.mark.promise("Clusters: Text of others harms no terminal")
@pytest.mark.parametrize("name", TEXTS)
def test_text_of_others(fake: Any, run: Run, name: str) -> None:
    with_event(TEXTS[name]).add_to(fake)
    assert "after" in printed(run, "why", "gpt")


@pytest.mark.promise("Clusters: Text of others harms no terminal")
@pytest.mark.parametrize("words", [["status", "gpt"], ["status", "gpt", "-o", "wide"], ["list", "-o", "wide"]])
@pytest.mark.parametrize("job", [with_event, with_exception, with_message])
def test_all_texts_at_once(fake: Any, run: Run, job: Callable[[str], JobBuilder], words: list[str]) -> None:
    job("".join(TEXTS.values())).add_to(fake)
    printed(run, *words)


def printed(run: Run, *words: str) -> str:
    """What a command prints, which moves no cursor and begins no line as an error of flk."""
    code, stdout, stderr = run(*words)
    assert code == 0
    for character in "\x1b\x07\r\x00\u202e\u2066":
        assert character not in stdout + stderr
    assert not any(line.startswith("error: ") for line in stdout.splitlines())
    return stdout + stderr
