"""Checksums: zlib-ng and zlib compute the same, and an image without zlib-ng works."""

from __future__ import annotations

import subprocess
import sys
import threading
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flk_runtime.system import checksum


@given(st.binary(max_size=300), st.integers(0, 300), st.integers(0, 300))
def test_the_checksum_of_a_section_is_that_of_zlib(data: bytes, begin: int, end: int) -> None:
    assert checksum.checksum(data, begin, end) == zlib.crc32(data[begin:end])


def test_data_of_more_than_one_chunk_has_the_checksum_of_the_whole() -> None:
    data = bytes(range(256)) * (checksum._CHUNK // 200)
    assert len(data) > checksum._CHUNK
    assert checksum.checksum(memoryview(data), 5, len(data) - 3) == zlib.crc32(data[5:-3])


def test_without_zlib_ng_zlib_takes_its_place() -> None:
    command = (
        "import sys; sys.modules['zlib_ng'] = None\n"
        "from flk_runtime.system.checksum import checksum, crc32\n"
        "import zlib; assert crc32 is zlib.crc32\n"
        "print(checksum(b'some bytes', 0, 10))"
    )
    done = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True, check=True)
    assert int(done.stdout) == zlib.crc32(b"some bytes")
    assert checksum.crc32.__module__ != "zlib", "the tests run with zlib-ng"


def test_threads_share_the_checksum_of_much_data(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a state of gigabytes, one thread takes longer than a step, and the next save waits for it."""
    data, both = bytes(range(256)) * 16, threading.Barrier(2, timeout=30)

    def crc32(piece: memoryview, value: int = 0) -> int:
        both.wait()
        return zlib.crc32(piece, value)

    for name, value in {"_CHUNK": 1024, "_SHARED": 4000, "crc32": crc32}.items():
        monkeypatch.setattr(checksum, name, value)
    monkeypatch.setattr(checksum.host, "cpu_count", lambda: 2)
    checksum._threads.cache_clear()
    try:
        assert checksum.checksum(data, 7, len(data)) == zlib.crc32(data[7:])
    finally:
        checksum._threads().shutdown()
        checksum._threads.cache_clear()
