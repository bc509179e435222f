"""The kind of an exception: a fault of disk, GPU, address or rendezvous, a usage error, or the training code's own."""

from __future__ import annotations

import contextlib
import errno
import os
import tempfile
from collections.abc import Iterator
from typing import Final

from flk_runtime import contract
from flk_runtime.system.text import text_of

_SHM: Final = "/dev/shm"  # noqa: S108 - not a temporary file
_ERRNOS: Final = {
    errno.ENOSPC: "disk_full",
    errno.EDQUOT: "disk_full",
    errno.EIO: "io",
    errno.ESTALE: "io",
    errno.EADDRINUSE: "address",
}
# Parts of messages of torch and CUDA. Those of CUDA are the texts of cudaGetErrorString for errors of the device or its
# driver: 46, 100, 214, 220, 714, 721, 802. Errors that a kernel may cause too (an illegal address) are not among them.
_WORDS: Final = {
    "gpu": (
        "CUDA-capable device(s) is/are busy or unavailable",
        "no CUDA-capable device is detected",
        "uncorrectable ECC error encountered",
        "uncorrectable NVLink error detected",
        "hardware stack error",
        "Invalid access of peer GPU memory over nvlink or a hardware error",
        "system not yet initialized",
        "GPU is lost",
    ),
    "address": ("EADDRINUSE",),
}


def kind_of(error: BaseException) -> str:
    """The kind of a `contract.Failure` for this exception, or for one that it was raised from."""
    links = list(chain(error))
    for link in links:
        if isinstance(link, OSError) and link.errno in _ERRNOS:
            return _ERRNOS[link.errno]
    for kind, words in _WORDS.items():
        if any(word in text_of(link) for link in links for word in words):
            return kind
    if any("PytorchStreamWriter failed writing" in text_of(link) for link in links):
        return "disk_full" if full_file_system(error) else "io"  # torch.save does not say why
    code = getattr(error, "code", None)  # of an error of flk_runtime
    if code is contract.ExitCode.USAGE:
        return "usage"
    return "rendezvous" if code is contract.ExitCode.INFRASTRUCTURE else "exception"


def full_file_system(error: BaseException) -> str:
    """The end of an error message that names a file system without space, with its size; empty if none is found.

    It is the one of the exception's file, else one of those that training writes to.
    """
    names = [link.filename for link in chain(error) if isinstance(link, OSError) and isinstance(link.filename, str)]
    for name in [*names, os.environ.get(contract.CHECKPOINT, ""), os.getcwd(), tempfile.gettempdir(), _SHM]:
        path = os.path.realpath(name) if name else ""
        while path and not os.path.exists(path):
            path = os.path.dirname(path)
        with contextlib.suppress(OSError):
            space = os.statvfs(path)
            if space.f_blocks and space.f_bavail <= space.f_blocks // 1000:
                while not os.path.ismount(path):
                    path = os.path.dirname(path)
                size = space.f_blocks * space.f_frsize / 2**30
                return f" (the file system at {path} is full; its size is {size:.3g} GiB)"
    return ""


def chain(error: BaseException) -> Iterator[BaseException]:
    """The exception, and those that it was raised from, as a traceback shows them."""
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        yield link
        seen.add(id(link))
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)
