"""The machine below the library: facts about the container, a rank's report of its failure, devices, random numbers.

Every package of flk_runtime above `discovery` may import this one, also the launcher. `host`, `report` and `text` use
the standard library only. `device` and `rng` need torch, so nothing is re-exported here and each module is imported by
its name: the launcher handles signals before it imports torch.
"""
