"""The table of causes: small pure functions over the picture of a job, each with a stable code and a page.

`CAUSES` is the table, in the order in which causes win, and `LATER` names those that only follow others. `find`
returns everything that it finds in a picture, the cause first. Only `flk.diagnose` imports this package.
"""

from flk.diagnose.causes.admission import awaits_controller
from flk.diagnose.causes.ending import job_failure
from flk.diagnose.causes.row import Cause
from flk.diagnose.causes.table import CAUSES, LATER, find

__all__ = ["CAUSES", "LATER", "Cause", "awaits_controller", "find", "job_failure"]
