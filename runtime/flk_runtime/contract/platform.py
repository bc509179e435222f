"""The machine of a process: its operating system (pods run Linux, `flk run` supports macOS too) and its GPUs."""

from __future__ import annotations

import sys

LINUX = sys.platform == "linux"
"""Whether this is Linux. Elsewhere there is no /proc, and ranks are new processes, since a fork may end in macOS's
libraries."""
VISIBLE_GPUS = "CUDA_VISIBLE_DEVICES"  # the variable that names the GPUs that a process may use


def gpu_names(visible: str) -> list[str]:
    """Return the numbers and UUIDs of the GPUs that a value of VISIBLE_GPUS names; -1 names none."""
    return [name for name in map(str.strip, visible.split(",")) if name not in ("", "-1")]
