"""The launcher, ``python -m flk_runtime``: the parent process of the ranks of one pod.

The launchers of all pods of a job agree on attempts (`rendezvous`), start the ranks (`ranks`, `forkserver`, `worker`),
pass on their output (`logs`, `output`), find the root cause of a failure (`failures`), report it (`records`) and end
with an exit code of the contract.
`agent` is the loop that connects these modules, and `start` the entry point.

Only `flk_runtime.__main__` and `flk_runtime.check` import this package. It imports nothing of the library that ranks
use, and torch inside functions only. Its interface is `start.main` and `worker.run_exit_handlers`. They are not
re-exported here, because a rank in a fresh interpreter starts as ``python -m flk_runtime.launcher.worker``, which would
then import the whole launcher first.
"""
