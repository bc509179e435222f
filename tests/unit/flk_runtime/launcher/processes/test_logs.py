"""Lines of the ranks: each has its prefix and is written whole, however its bytes were read."""

from __future__ import annotations

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flk_runtime.launcher.processes import logs
from flk_runtime.system.host import write_all


@given(st.lists(st.text("ab", max_size=5), max_size=6), st.lists(st.integers(1, 4), min_size=1, max_size=20))
def test_lines_do_not_depend_on_how_the_bytes_were_read(lines: list[str], cuts: list[int]) -> None:
    written: list[bytes] = []
    prefixer = logs.Prefixer("[rank 1] ", written.append)
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
    prefixer = logs.Prefixer("> ", written.append)
    for chunk in chunks:
        prefixer.feed(chunk)
    prefixer.end()
    assert b"".join(written).decode() == "".join(f"> {line}\n" for line in lines)


def test_secrets_are_hidden_in_lines_however_their_bytes_were_read() -> None:
    written: list[bytes] = []
    seen: list[bytes] = []
    prefixer = logs.Prefixer("> ", written.append, look=seen.append, secrets=["canary-7f3b"])
    for chunk in (b'{"token": "cana', b'ry-7f3b"}\nlogin with canary-7f3b at postgres://me:pa', b"ss@db/runs"):
        prefixer.feed(chunk)
    prefixer.end()
    assert b"".join(written) == b'> {"token": "***"}\n> login with *** at postgres://me:***@db/runs\n'
    assert seen == [b'{"token": "***"}']
    assert prefixer.tail == '{"token": "***"}\nlogin with *** at postgres://me:***@db/runs'


def test_a_very_long_line_is_split() -> None:
    counted: list[int] = []
    prefixer = logs.Prefixer("> ", lambda data: None, counted.append)
    for _ in range(4):
        prefixer.feed(b"x" * logs.LINE_LIMIT)
    assert sum(counted) >= 3


def test_a_closed_reader_is_no_error() -> None:
    read, write = os.pipe()
    os.close(read)
    write_all(write, b"nobody hears this")
    os.close(write)


def test_the_rest_of_a_pipe_is_bounded_if_another_process_writes_without_end() -> None:
    pipes = logs.RankPipes(logs.Prefixer("", 1), logs.Prefixer("", 2))
    pipes.close_write_ends()
    endless = os.open("/dev/zero", os.O_RDONLY)
    report = pipes.read_ends[2]
    os.dup2(endless, report)
    os.close(endless)
    pipes.read_rest_and_close(report)
    assert report not in pipes.read_ends
