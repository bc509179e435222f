"""Helpers for a process and its container: host facts, the report of an exception, devices, random generators, pytrees,
the progress page that a rank shares with its launcher, checksums, and the format of part files.

Every package of flk_runtime except `discovery` may import this one, the launcher too. `host`, `progress`, `pytree`,
`report` and `text` use the standard library only, and `checksum` and `part` zlib-ng where it is installed. `device` and
`rng` import torch. The launcher handles
signals before it imports torch, so nothing is re-exported here: import each module by its name.
"""
