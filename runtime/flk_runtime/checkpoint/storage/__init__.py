"""Checkpoints in storage: a folder or S3, where a checkpoint becomes visible only when it is whole.

`open_destination` opens a folder or an address, `find_newest` finds the checkpoint to resume from, and `problem_of`
says whether the files of one are whole. Only `flk_runtime.checkpoint` imports this package.
"""

from flk_runtime.checkpoint.storage.destination import Destination, open_destination
from flk_runtime.checkpoint.storage.folder import exists, open_section
from flk_runtime.checkpoint.storage.restore import Found, find_newest, is_shared, problem_of

__all__ = [
    "Destination",
    "Found",
    "exists",
    "find_newest",
    "is_shared",
    "open_destination",
    "open_section",
    "problem_of",
]
