"""Checkpoints in storage: a folder or S3, where a checkpoint becomes visible only when it is whole.

`open_destination` opens a folder or an address, and `find_newest` finds the checkpoint to resume from. Only
`flk_runtime.checkpoint` imports this package.
"""

from flk_runtime.checkpoint.storage.folder import exists, open_section
from flk_runtime.checkpoint.storage.restore import Destination, find_newest, is_shared, open_destination

__all__ = ["Destination", "exists", "find_newest", "is_shared", "open_destination", "open_section"]
