"""The operating system: flk's pods are Linux, and `flk run` is on macOS too."""

from __future__ import annotations

import sys

LINUX = sys.platform == "linux"
"""Whether this is Linux. Elsewhere there is no /proc, and ranks are new processes, since a fork may end in macOS's
libraries."""
