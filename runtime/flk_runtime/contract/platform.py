"""The operating system: pods run Linux, and `flk run` supports macOS too."""

from __future__ import annotations

import sys

LINUX = sys.platform == "linux"
"""Whether this is Linux. Elsewhere there is no /proc, and ranks are new processes, since a fork may end in macOS's
libraries."""
