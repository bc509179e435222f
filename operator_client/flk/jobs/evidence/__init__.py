"""Evidence: what is kept of a job for when its pods or the job itself are gone.

A `Recorder` writes it to the user's state folder while flk follows or waits for a job, and the launchers write their
record to the cluster. `find` reads both. The package keeps objects, events, records, states, last lines and the last
cause, and derives nothing. `flk.jobs` and `flk.cli` import it.
"""

from flk.jobs.evidence.cluster import find
from flk.jobs.evidence.model import KeptCause, KeptJob, StateChange
from flk.jobs.evidence.recorder import Recorder
from flk.jobs.evidence.store import Store

__all__ = ["KeptCause", "KeptJob", "Recorder", "StateChange", "Store", "find"]
