"""Checksums: zlib-ng and zlib compute the same, and an image without zlib-ng works."""

from __future__ import annotations

import subprocess
import sys
import zlib

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
