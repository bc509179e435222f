"""The output of all ranks of a job: one reader for each pod's log, and two ways to merge them.

`follow` yields lines as they come until the job ends, and `dump` yields the lines that are there now, pod by pod.
`LogOptions` chooses pods and lines. Commands and `JobHandle.logs` use it.
"""

from flk.jobs.logs.dump import dump
from flk.jobs.logs.lines import LogLine, LogOptions, LogPosition
from flk.jobs.logs.stream import follow

__all__ = ["LogLine", "LogOptions", "LogPosition", "dump", "follow"]
