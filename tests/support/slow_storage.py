"""The beginning of a script whose checkpoints in a folder take a second longer to write."""

SLOW_STORAGE = """
import time
from flk_runtime.checkpoint.storage.folder import FolderDestination

create = FolderDestination.create

def slow(*arguments):
    time.sleep(1)
    return create(*arguments)

FolderDestination.create = slow
"""
