"""Modules that the launcher and its ranks share: the progress page of a rank, the observer that shows the launcher a
rank's stacks, the format of shard files, and the report of an exception.

The launcher handles signals before it imports torch, so nothing is re-exported here: import each module by its name.
"""
