"""Message authentication codes of bulk data: AES-GMAC (NIST SP 800-38D) by Python's OpenSSL, or else HMAC-SHA256.

Both are computed in hardware, and GMAC four times as fast: where a state is saved in memory in every step, the code is
most of the work for each byte. Python has no module for it, so OpenSSL is called directly, if it can be.
"""

from __future__ import annotations

import contextlib
import ctypes
import hmac
from typing import Any, Final, Protocol

DIGEST: Final = "sha256"
_GET_TAG: Final = 0x10  # EVP_CTRL_AEAD_GET_TAG
_TAG: Final = 16  # bytes
_KEY: Final = 16


class BulkCode(Protocol):
    """A code of bulk data that arrives in pieces."""

    def update(self, data: Any, /) -> None: ...
    def digest(self) -> bytes: ...


def _load() -> Any:
    """The functions of OpenSSL; None where they cannot be called."""
    try:
        import _hashlib

        found = ctypes.CDLL(_hashlib.__file__)
        for name in ("EVP_CIPHER_CTX_new", "EVP_aes_128_gcm"):
            getattr(found, name).restype = ctypes.c_void_p
        for name in ("EVP_EncryptInit_ex", "EVP_EncryptUpdate", "EVP_EncryptFinal_ex", "EVP_CIPHER_CTX_ctrl"):
            getattr(found, name).restype = ctypes.c_int
        found.EVP_CIPHER_CTX_free.restype = None
    except (ImportError, AttributeError, OSError):
        return None
    return found


_openssl: Final = _load()
HAS_GMAC: Final[bool] = _openssl is not None


def bulk_code(key: bytes, number: int, *, gmac: bool) -> BulkCode:
    """The code of the bulk data with this number. No two of them may have the same key and number.

    ``gmac``: both ends have GMAC. The code has 32 bytes in any case.
    """
    if gmac:
        return _Gmac(key, number)
    return hmac.new(key, number.to_bytes(8, "big"), DIGEST)


class _Gmac:
    """GMAC of bulk data, and HMAC-SHA256 of that, so that the tag itself is not sent."""

    def __init__(self, key: bytes, number: int) -> None:
        self._key, self._length = key, ctypes.c_int()
        self._context = ctypes.c_void_p(_openssl.EVP_CIPHER_CTX_new())
        own = hmac.digest(key, b"gmac", DIGEST)[:_KEY]
        cipher = ctypes.c_void_p(_openssl.EVP_aes_128_gcm())
        _check(_openssl.EVP_EncryptInit_ex(self._context, cipher, None, own, number.to_bytes(12, "big")))

    def update(self, data: bytes | bytearray | memoryview) -> None:
        """Add a piece. It is data that GCM authenticates and does not encrypt."""
        view = memoryview(data)
        if view.nbytes:  # ctypes has no address of what cannot be written
            piece = view.tobytes() if view.readonly else ctypes.byref(ctypes.c_char.from_buffer(view))
            _check(_openssl.EVP_EncryptUpdate(self._context, None, ctypes.byref(self._length), piece, view.nbytes))

    def digest(self) -> bytes:
        """The code of all pieces. Nothing may follow."""
        tag = ctypes.create_string_buffer(_TAG)
        _check(_openssl.EVP_EncryptFinal_ex(self._context, tag, ctypes.byref(self._length)))
        _check(_openssl.EVP_CIPHER_CTX_ctrl(self._context, _GET_TAG, _TAG, tag))
        return hmac.digest(self._key, tag.raw, DIGEST)

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError):
            _openssl.EVP_CIPHER_CTX_free(self._context)


def _check(result: int) -> None:
    if result != 1:
        raise RuntimeError("OpenSSL cannot compute GMAC")
