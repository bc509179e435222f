"""`flk run`: a job on this machine, one launcher for each replica.

`run` starts the launchers and follows them, with the `variables` of their pods, the `places` that stand for volumes and
caches, the `gpus` of each, and the `python` that has torch. It re-exports nothing: `flk plan` needs two of them only.
"""
