"""Hangs and slow ranks: notices that a job makes no progress, collects the stacks of all ranks, and names the cause.

`watch` is a launcher's own side: it sends signs of progress (`status`) of its ranks to the leader, and takes a
`snapshot` of each with `collect` when the leader asks. `detector` is the leader's side: it decides with `watchdog` and
the limits of `phases` whether the job hangs and with `stragglers` which ranks are slow, finds with `diagnosis` the rank
that the others wait for, and prints stacks with `report`. Only the launcher imports this package.
"""
