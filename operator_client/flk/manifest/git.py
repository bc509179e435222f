"""Ask git about the user's folder, without the programs that the folder's own configuration names.

The folder may be an unpacked archive of somebody else, with its ``.git``. What it says about files counts; what it says
about programs does not.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Final

# Read after the folder's configuration: no monitor of files, and no hooks.
_SETTINGS: Final = ("-c", "core.fsmonitor=false", "-c", f"core.hooksPath={os.devnull}")
# No command for a remote, of which a partial clone gets what it lacks, and no index is written, of which a hook hears.
_ENVIRONMENT: Final = {"GIT_ALLOW_PROTOCOL": "none", "GIT_NO_LAZY_FETCH": "1", "GIT_OPTIONAL_LOCKS": "0"}


def ask_git(root: Path, *arguments: str, timeout: float | None = None) -> subprocess.CompletedProcess[bytes]:
    """Run git in a folder, and return how it ended. Raises OSError without git, and subprocess.TimeoutExpired."""
    command = ["git", "-C", str(root), *_SETTINGS, *arguments]
    environment = {**os.environ, **_ENVIRONMENT}
    return subprocess.run(command, capture_output=True, check=False, timeout=timeout, env=environment)
