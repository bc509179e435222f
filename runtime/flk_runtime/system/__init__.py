"""Helpers for a process and its container: host facts, faults, devices, random generators, trials, pytrees, texts.

Every package of flk_runtime except `discovery` may import this one, the launcher too. `faults`, `host`, `pytree`,
`text` and `trial` use the standard library only, and `checksum` zlib-ng where it is installed. `device`, `rng` and
`torch_version` import torch. The launcher handles signals before it imports torch, so nothing is re-exported here:
import each module by its name.
"""
