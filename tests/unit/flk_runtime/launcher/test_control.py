"""Questions that processes of the pod ask the launcher."""

from __future__ import annotations

import json
import queue
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from flk_runtime.launcher import control as module
from flk_runtime.launcher.control import Control


class Asked:
    """A launcher that can be asked, and the names under which the leader was asked."""

    def __init__(self, folder: Path) -> None:
        self.path = str(folder / "control")
        self.askers: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.control = Control(str(folder), {"metrics": self.askers.put})

    def ask(self, question: bytes) -> socket.socket:
        """A process that has asked."""
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(30)
        connection.connect(self.path)
        connection.sendall(question)
        return connection


@pytest.fixture
def asked(tmp_path: Path) -> Iterator[Asked]:
    made = Asked(tmp_path)
    yield made
    made.control._listener.shutdown(socket.SHUT_RDWR)
    made.control._listener.close()


def test_each_process_gets_its_own_answer(asked: Asked) -> None:
    first, second = asked.ask(b"metrics\n"), asked.ask(b"metrics\n")
    for asker in (asked.askers.get(timeout=30) for _ in range(2)):
        asked.control.answer(asker, {"for": asker})
    with first, second:
        answers = [json.load(each.makefile()) for each in (first, second)]
    assert sorted(each["for"] for each in answers) == ["1", "2"]


def test_a_question_that_the_leader_does_not_answer_keeps_nothing(
    asked: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The leader may be lost. An answer that comes later goes to nobody."""
    monkeypatch.setattr(module, "_TIMEOUT", 0.1)
    asker, asked_by = socket.socketpair()
    with asker:
        asker.sendall(b"metrics\n")
        asked.control._serve(asked_by)
        assert asker.recv(1) == b""
    assert asked.control._answers == {}
    asked.control.answer(asked.askers.get(timeout=30), {})


@pytest.mark.parametrize("question", [b"nothing of this\n", b"\xff\xfe\n"])
def test_what_is_no_question_is_closed(asked: Asked, question: bytes) -> None:
    with asked.ask(question) as connection:
        assert connection.recv(1) == b""
    assert asked.askers.empty()
