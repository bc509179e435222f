"""The launcher, ``python -m flk_runtime``: the parent process of the ranks of one pod.

A *rank* is one process of the training, a *pod* the ranks of one launcher, an *attempt* one start of all ranks of the
job. The *leader* is the launcher of pod 0, a *member* any launcher that takes part, pod 0's included.

The launchers of all pods of a job send each other messages (`transport`). The leader decides (`coordinator`) which
attempt runs, why it ended, and what follows; `preemption` agrees on the step after which all ranks save. Each launcher
starts the ranks of its pod and passes on what they print (`processes`), holds checkpoints in memory (`replication`),
takes stacks when they hang (`hangs`), measures (`telemetry`), reports (`records`) and ends with an exit code of
the contract. `agent` is the loop that connects these, `start` the entry point, which puts its parts together.

Only `flk_runtime.__main__` and `flk_runtime.check` import this package. It imports nothing of the library that ranks
use, and torch inside functions only. Its interface is `start.main` and `processes.rank_process`. They are not
re-exported here, because a rank in a fresh interpreter starts as
``python -m flk_runtime.launcher.processes.rank_process``, which would then import the whole launcher first.
"""
