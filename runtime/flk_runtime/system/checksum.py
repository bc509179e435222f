"""CRC-32 of data. zlib-ng computes the same values as zlib in less than a tenth of the time, where it is installed."""

from __future__ import annotations

import functools
import mmap
from concurrent.futures import Executor
from typing import Final

from flk_runtime.system import host

try:
    from zlib_ng.zlib_ng import crc32
except ImportError:  # an image of the user's own need not have it
    from zlib import crc32

__all__ = ["checksum", "crc32"]

_CHUNK: Final = 1 << 24  # bytes over which a checksum is computed at once; both release the GIL meanwhile
_SHARED: Final = 1 << 26  # bytes from which on threads share the work
_THREADS: Final = 8  # at most: they read as fast as memory can be read
_POLYNOMIAL: Final = 0xEDB88320  # of CRC-32: the highest bit is the coefficient of 1, the lowest that of x^31


def checksum(memory: mmap.mmap | memoryview | bytes, begin: int, end: int) -> int:
    """The CRC-32 of the bytes from ``begin`` to ``end``. Threads share the work if there are many."""
    positions = range(begin, end, _CHUNK)
    value = 0
    with memoryview(memory) as view:

        def of_chunk(position: int) -> tuple[int, int]:
            with view[position : min(end, position + _CHUNK)] as chunk:
                return crc32(chunk), len(chunk)

        found = map(of_chunk, positions) if end - begin < _SHARED else _threads().map(of_chunk, positions)
        for each, length in found:
            value = _product(value, _power(length)) ^ each
    return value


@functools.cache
def _threads() -> Executor:
    """The threads of this process that compute checksums."""
    from concurrent.futures import ThreadPoolExecutor  # ranks need it not

    return ThreadPoolExecutor(min(_THREADS, host.cpu_count()), "checksum")


@functools.lru_cache(8)
def _power(length: int) -> int:
    """The factor by which ``length`` more bytes change a CRC: x^8 to that power."""
    factor, square = 1 << 31, 1 << 23  # 1 and x^8
    while length:
        if length & 1:
            factor = _product(factor, square)
        square = _product(square, square)
        length >>= 1
    return factor


def _product(first: int, second: int) -> int:
    """The product of two polynomials modulo the one of CRC-32."""
    product = 0
    while first:
        if first & 1 << 31:
            product ^= second
        first = first << 1 & 0xFFFFFFFF
        second = second >> 1 ^ _POLYNOMIAL * (second & 1)
    return product
