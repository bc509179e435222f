"""The kind of a failure by the text of its exception: what torch, CUDA, NCCL and gloo write."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from flk_runtime.contract.failure import Kind, kind_of_loss

# What torch, CUDA, NCCL and gloo write, in the order of the search: the kind of the failure, the exceptions' classes
# (None: of any class; "": lines on stderr), and words that one of the lines has.
_TORCH_TYPES: Final = frozenset({"", "RuntimeError"})
_TEXTS: Final[Sequence[tuple[Kind, frozenset[str] | None, tuple[str, ...]]]] = (
    # CUDA's are the texts of cudaGetErrorString for errors of the device or its driver: 46, 100, 214, 220, 714, 721,
    # 802. Errors that a kernel may cause too (an illegal address) are not among them.
    (Kind.GPU, None, (
        "CUDA-capable device(s) is/are busy or unavailable",
        "no CUDA-capable device is detected",
        "uncorrectable ECC error encountered",
        "uncorrectable NVLink error detected",
        "hardware stack error",
        "Invalid access of peer GPU memory over nvlink or a hardware error",
        "system not yet initialized",
        "GPU is lost",
    )),
    (Kind.ADDRESS, None, ("EADDRINUSE",)),
    (Kind.IO, None, ("PytorchStreamWriter failed writing",)),  # torch.save does not say why
    # No connection broke: NCCL or gloo refuses how it is used (two ranks on one GPU, sizes that differ between ranks),
    # or NCCL's thread or a collective meets an error that this rank's own kernels have left on its GPU.
    (Kind.EXCEPTION, None, (
        "ncclInvalidUsage",
        "ncclInvalidArgument",
        "Duplicate GPU detected",
        "gloo::EnforceNotMet",
        "enforce fail at",
        "CUDA error: ",
        "Cuda failure ",
    )),
    # A rank lost the connection to a peer. An OSError does not say so, since it comes from a socket or a pipe that the
    # script has opened itself.
    (Kind.CONNECTION, frozenset({"DistBackendError", "DistNetworkError", "DistStoreError"}), ("",)),
    (Kind.CONNECTION, _TORCH_TYPES, (
        "gloo/transport",
        "Connection closed by peer",
        "Connection reset by peer",
        "Broken pipe",
        "NCCL",
        "Watchdog caught collective",
        "recvValue failed",
        "sendBytes failed",
    )),
)  # fmt: skip


# What to say of exceptions that name neither their cause nor a cure, by words of their messages.
_ADVICE: Final = {
    # gloo's; NCCL waits, and the launcher finds the hang
    "op.preamble.length <= op.nbytes": (
        "the ranks called different collectives, or one with other sizes, as where a rank skips a batch, ends its loop "
        "first, or evaluates, saves or takes a mean alone: do each of these on all ranks or on none"
    ),
    "can't start new thread": (
        "the pod is at a limit of processes, for which threads count (pids.max of the pod, ulimit -u), or has no "
        "memory for another thread: use fewer workers and threads, or raise the limit"
    ),
}


def with_advice(message: str) -> str:
    """``message`` of an exception, and before it the cause and the cure, where torch and Python name none."""
    advice = next((advice for words, advice in _ADVICE.items() if words in message), "")
    return f"{advice} ({message})" if advice else message


def kind_of_text(type_name: str, message: str) -> Kind:
    """The kind of a failure by the class and the message of its exception. Without a class: by lines on stderr."""
    for kind, types, words in _TEXTS:
        if (types is None or type_name in types) and any(word in message for word in words):
            return kind_of_loss(message) if kind is Kind.CONNECTION else kind
    return Kind.EXCEPTION
