"""What in a cluster would prevent a job from running, found before the job is submitted.

`read` reads the cluster once, `examine` applies a table of small pure checks to what was read, and `trial` runs the
ranks of a job for a moment. `flk doctor` and `flk submit --check` use it. Only `flk.cli` imports this package.
"""

from flk.doctor.checks import examine
from flk.doctor.model import Facts, Level, Pods, Result
from flk.doctor.reading import read
from flk.doctor.trial import trial

__all__ = ["Facts", "Level", "Pods", "Result", "examine", "read", "trial"]
