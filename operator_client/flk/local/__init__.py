"""`flk run`: a job on this machine, one launcher for each replica.

`run` starts the launchers and follows them, with what this `machine` gives to each, and the `places` that stand for
volumes and caches. It re-exports nothing: `flk plan` needs two of them only.
"""
