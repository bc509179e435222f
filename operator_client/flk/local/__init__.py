"""`flk run`: a job on this machine, one launcher for each replica.

`run` starts the launchers and follows them, with what this `machine` gives to each, and the `places` that stand for
volumes and caches. `plan` runs a script here up to its first step; `bench` is the job that measures strategies, here or
in a cluster. Nothing is re-exported, as each command needs few of them.
"""
