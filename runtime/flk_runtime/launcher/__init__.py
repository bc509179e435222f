"""The launcher, ``python -m flk_runtime``: the parent process of the ranks of one pod.

The launchers of all pods of a job send each other messages (`transport`). The launcher of pod 0 decides (`coordinator`)
which attempt runs, why it ended, and what follows. Each launcher starts the ranks of its pod (`ranks`, `forkserver`,
`rank_process`), passes on their output (`logs`, `output`), says how they failed (`rank_failure`), holds checkpoints in
memory (`replication`), takes stacks when they hang (`hangs`), reports (`record_writer`) and ends with an exit code of
the contract. `agent` is the loop that connects these modules, `pod_attempt` its state of one attempt, and `start` the
entry point.

Only `flk_runtime.__main__` and `flk_runtime.check` import this package. It imports nothing of the library that ranks
use, and torch inside functions only. Its interface is `start.main` and `rank_process.run_exit_handlers`. They are not
re-exported here, because a rank in a fresh interpreter starts as ``python -m flk_runtime.launcher.rank_process``,
which would then import the whole launcher first.
"""
