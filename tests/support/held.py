"""What the processes of a job hold: objects, open files, threads, memory, and files of checkpoints in memory."""

from __future__ import annotations

import ast
import os
import signal
from pathlib import Path

from tests.support.memory import folder_of
from tests.support.pods import Pods
from tests.support.processes import until

ASK = signal.SIGRTMIN + 7

# Counts what a process holds. Each interpreter of Python imports the module with the name sitecustomize at its start. A
# launcher answers a signal: with a thread for that, it would fork no ranks.
COUNT = f"""
    import collections, gc, os, pathlib, signal, sys

    def held():
        gc.collect()
        found = gc.get_objects()
        tables = [each for each in found if type(each) in (dict, list, set, collections.deque)]
        return {{"objects": len(found), "entries": sum(map(len, tables))}}

    def answer(number, frame):
        (folder / "new").write_text(repr(held()))
        (folder / "new").rename(folder / "held")

    if sys.orig_argv[1:3] == ["-m", "flk_runtime"]:
        folder = pathlib.Path("count", os.environ["FLK_POD_INDEX"]).resolve()
        folder.mkdir(parents=True)
        signal.signal({ASK}, answer)
"""


def count_in(job: Pods) -> None:
    """Have all processes of a job that starts after this be able to count what they hold."""
    job.write(COUNT, "sitecustomize.py")
    job.variables["PYTHONPATH"] = os.pathsep.join(filter(None, (str(job.folder), os.environ.get("PYTHONPATH"))))


def of_process(pid: int) -> dict[str, int]:
    """Open files, threads, and bytes of anonymous memory of a process."""
    proc = Path("/proc", str(pid))
    fields = dict(line.split(":", 1) for line in (proc / "status").read_text().splitlines())
    return {
        "files": len(os.listdir(proc / "fd")),
        "threads": int(fields["Threads"]),
        "memory": int(fields["RssAnon"].split()[0]) << 10,
    }


def of_launcher(job: Pods, pod: int, root: Path) -> dict[str, int]:
    """What a launcher holds, whose checkpoints in memory are in ``root``."""
    answer = job.folder / "count" / str(pod) / "held"
    os.kill(job.running[pod].pid, ASK)
    until(answer.exists, f"the launcher of pod {pod} counts", context=job.logs_of_all)
    counts: dict[str, int] = ast.literal_eval(answer.read_text())
    answer.unlink()
    shards = list(folder_of(root, pod).iterdir())
    shared = {"shards": len(shards), "bytes of shards": sum(path.stat().st_size for path in shards)}
    return counts | shared | of_process(job.running[pod].pid)
