"""Records: what the launcher of pod 0 writes about the job, for the log, the termination message and the cluster.

`writer` writes them, `archive` keeps the latest where it outlives the pods, `history` makes them of the
attempts, and `ledger` adds what the time of the job went into.
"""
