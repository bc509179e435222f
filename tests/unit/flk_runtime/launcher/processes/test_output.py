"""Output of the launcher: nobody waits for its reader, and what is written arrives in order."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flk_runtime.launcher.processes import output
from flk_runtime.launcher.processes.output import Output

LINE = b"x" * 1023 + b"\n"


class Pipe:
    """A pipe whose reader stalls until `read` is called, and the output that writes to it."""

    def __init__(self) -> None:
        self.room = threading.Event()
        self._read_end, self._write_end = os.pipe()
        self.output = Output(self._write_end, self._write_end, self.room.set)

    def read(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            data += os.read(self._read_end, size - len(data))
        return data

    def read_all(self) -> bytes:
        """Read until the other end is closed."""
        return b"".join(iter(lambda: os.read(self._read_end, 1 << 16), b""))


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    return Pipe()


def test_writing_returns_at_once_when_nobody_reads(pipe: Pipe) -> None:
    while not pipe.output.is_full:
        pipe.output.write_stdout(LINE)
    pipe.output.write_stderr(b"[pod 0] a line of the launcher\n")
    assert not pipe.output.flush(0.01)
    assert not pipe.room.is_set()
    pipe.read(1 << 20)
    assert pipe.room.wait(10)
    assert not pipe.output.is_full


def test_nothing_is_lost_on_a_descriptor_that_another_process_has_made_non_blocking(pipe: Pipe) -> None:
    """All processes that have the same terminal or pipe share this setting."""
    os.set_blocking(pipe._write_end, False)
    written = [b"%d" % number + LINE for number in range(1000)]
    with ThreadPoolExecutor(1) as thread:
        found = thread.submit(pipe.read_all)
        for line in written:
            pipe.output.write_stdout(line)
        assert pipe.output.flush(30)
        os.close(pipe._write_end)
        assert found.result() == b"".join(written)


@settings(max_examples=50)
@given(st.lists(st.text("ab", max_size=5), max_size=6), st.lists(st.integers(1, 4), min_size=1, max_size=20))
def test_lines_do_not_depend_on_how_the_bytes_were_read(lines: list[str], cuts: list[int]) -> None:
    written: list[bytes] = []
    prefixer = output.Prefixer("[rank 1] ", written.append)
    data = "".join(line + "\n" for line in lines).encode()
    position = 0
    while position < len(data):
        size = cuts[position % len(cuts)]
        prefixer.feed(data[position : position + size])
        position += size
    prefixer.end()
    assert b"".join(written) == "".join(f"[rank 1] {line}\n" for line in lines).encode()


@pytest.mark.parametrize(
    ("chunks", "lines"),
    [
        ([b"10%\r", b"20%\r", b"30%\n"], ["10%", "20%", "30%"]),
        ([b"windows\r", b"\nnext\r\n"], ["windows", "next"]),
        ([b"no end"], ["no end"]),
        ([b"bar\r"], ["bar"]),
        ([b"", b"\n"], [""]),
        ([b"caf\xc3", b"\xa9\n"], ["caf\u00e9"]),
    ],
)
def test_line_ends(chunks: list[bytes], lines: list[str]) -> None:
    written: list[bytes] = []
    prefixer = output.Prefixer("> ", written.append)
    for chunk in chunks:
        prefixer.feed(chunk)
    prefixer.end()
    assert b"".join(written).decode() == "".join(f"> {line}\n" for line in lines)


def test_secrets_are_hidden_in_lines_however_their_bytes_were_read() -> None:
    written: list[bytes] = []
    seen: list[bytes] = []
    prefixer = output.Prefixer("> ", written.append, look=seen.append, secrets=["canary-7f3b", "\udcffkey"])
    for chunk in (b'{"token": "cana', b'ry-7f3b"}\nlogin with canary-7f3b, \xffkey at postgres://me:pa', b"ss@db/runs"):
        prefixer.feed(chunk)
    prefixer.end()
    assert b"".join(written) == b'> {"token": "***"}\n> login with ***, *** at postgres://me:***@db/runs\n'
    assert seen == [b'{"token": "***"}']
    assert prefixer.tail == '{"token": "***"}\nlogin with ***, *** at postgres://me:***@db/runs'


def test_the_rest_of_a_pipe_is_bounded_if_another_process_writes_without_end() -> None:
    pipes = output.RankPipes(output.Prefixer("", 1), output.Prefixer("", 2))
    pipes.close_write_ends()
    endless = os.open("/dev/zero", os.O_RDONLY)
    report = pipes.read_ends[2]
    os.dup2(endless, report)
    os.close(endless)
    pipes.read_rest_and_close(report)
    assert report not in pipes.read_ends


def test_pipes_that_cannot_all_be_opened_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    ends = os.pipe()
    answers = iter([ends])

    def pipe() -> tuple[int, int]:
        for answer in answers:
            return answer
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(os, "pipe", pipe)
    with pytest.raises(OSError, match="Too many open files"):
        output.RankPipes(output.Prefixer("", 1), output.Prefixer("", 2))
    for end in ends:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(end)
