"""Helpers for a process and its container: host facts, devices, random generators, pytrees, checksums, texts.

Every package of flk_runtime except `discovery` may import this one, the launcher too. `host`, `pytree` and `text` use
the standard library only, and `checksum` zlib-ng where it is installed. `device` and `rng` import torch. The launcher
handles signals before it imports torch, so nothing is re-exported here: import each module by its name.
"""
