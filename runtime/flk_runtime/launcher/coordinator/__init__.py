"""The coordinator of a job, in the launcher of pod 0: which attempt runs, with which pods, why it ended, what follows.

`leader` decides and sends messages (`launcher.transport`). It has no sockets, threads or clock of its own. It asks:

- `membership`: which pods train in the next attempt
- `memory`: from which checkpoint in memory an attempt starts, and which shards a launcher transfers before it ends
- `policy`: what was the root cause of an attempt's end, and whether another attempt follows
"""
