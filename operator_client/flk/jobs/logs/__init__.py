"""The output of all ranks of a job: one reader for each pod's log, and two ways to merge them.

`follow` yields lines as they come until the job ends, `dump` yields the lines that are there now, pod by pod, and
`first_error` yields the lines of the rank that failed first. `LogOptions` chooses pods and lines. Commands and
`JobHandle.logs` use it.
"""

from flk.jobs.logs.dump import dump, first_error
from flk.jobs.logs.lines import LogLine, LogOptions, LogPosition
from flk.jobs.logs.stream import follow

__all__ = ["LogLine", "LogOptions", "LogPosition", "dump", "first_error", "follow"]
