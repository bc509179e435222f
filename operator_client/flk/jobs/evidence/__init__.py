"""Evidence: what flk keeps of a job in the user's state folder, for when its pods or the job itself are gone.

A `Recorder` writes it while flk follows or waits for a job, `find` reads it. The package keeps objects, events,
records, states and last lines, and derives nothing. `flk.jobs` and `flk.cli` import it.
"""

from flk.jobs.evidence.model import KeptJob, StateChange
from flk.jobs.evidence.recorder import Recorder
from flk.jobs.evidence.store import Store, find

__all__ = ["KeptJob", "Recorder", "StateChange", "Store", "find"]
