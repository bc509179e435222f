"""Hangs and slow ranks: notices that a job makes no progress, collects the stacks of all ranks, and names the cause.

`watch` is a launcher's own side: it makes the status of its ranks (`flk_runtime.contract.status`), sends it to the
leader, and takes a `snapshot` of each rank when the leader asks. `detector` is the leader's side: it decides by the
limit of each phase whether the job hangs, finds slow ranks, and with `diagnosis` the rank that the others wait for.
Only the launcher imports this package.
"""
