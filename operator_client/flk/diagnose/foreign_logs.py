"""Find the first exception in the logs of pods that flk's launcher did not start: torchrun, plain python, Lightning."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from flk.diagnose.model import PodState
from flk.diagnose.picture import Picture
from flk_runtime.contract import Failure

_TRACEBACK: Final = "Traceback (most recent call last):"
_PREFIX: Final = re.compile(r"^(?:\[[^\]]*\]:? ?|\([^)]*\) )")  # torchrun's [rank0]: and [default0]:
_RANK: Final = re.compile(r"\[(?:rank|default)(\d+)\]")
_EXCEPTION: Final = re.compile(r"^([A-Za-z_][\w.]*(?:Error|Exception|Exit|Interrupt|Warning|Failure|\w))(?:: (.*))?$")
# Exceptions of ranks that only noticed that another rank was gone, and of launchers that report their children's ends.
_CONSEQUENCE: Final = re.compile(
    r"Connection (?:reset|closed|refused)|Broken pipe|Socket Timeout|Timed out|[Ww]atchdog|NCCL (?:communicator was "
    r")?abort|"
    r"ncclRemoteError|ncclSystemError|remote process exited|peer closed|ChildFailedError|SignalException|"
    r"RendezvousConnectionError|RendezvousTimeoutError|DistStoreError|DistNetworkError|DistBackendError|gloo.*(?:closed|reset)"
)


def first_exception(picture: Picture) -> Failure | None:
    """Return the first exception in the logs that is not a consequence of another rank's end, None if there is none.

    Pods are taken in the order in which they ended, because the logs themselves carry no times.
    """
    pods = {pod.name: pod for pod in picture.pods}
    ordered = [pods[name] for name in picture.around.logs if name in pods]
    ordered.sort(key=lambda pod: (pod.ended is None, pod.ended or 0.0))
    secondary: Failure | None = None
    for pod in ordered:
        for failure in exceptions(picture.around.logs[pod.name], pod):
            if not failure.secondary:
                return failure
            secondary = secondary or failure
    return secondary


def exceptions(lines: Sequence[str], pod: PodState) -> list[Failure]:
    """Return the exceptions in the log of a pod, in their order."""
    found: list[Failure] = []
    block: list[str] = []
    for raw in lines:
        line = _PREFIX.sub("", raw.rstrip())
        if line.strip() == _TRACEBACK:
            block = [line]
            rank = _RANK.search(raw)
            number = int(rank[1]) if rank else pod.ranks[0] if len(pod.ranks) == 1 else None
            continue
        if not block:
            continue
        block.append(line)
        match = _EXCEPTION.match(line)
        if match and not line.startswith(" "):
            kind, message = match[1], (match[2] or "").strip()
            text = "\n".join(block)
            found.append(
                Failure(
                    "exception",
                    pod.index,
                    number,
                    pod.name,
                    pod.node,
                    time=pod.ended or 0.0,
                    type=kind.rpartition(".")[2],
                    message=message,
                    traceback=text,
                    exit_code=pod.exit_code,
                    secondary=bool(_CONSEQUENCE.search(f"{kind}: {message}")),
                )
            )
            block = []
    return found
