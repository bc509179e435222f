"""Folders of this machine that stand for what pods have: volumes, memory, folders of code and of packages."""

from __future__ import annotations

import contextlib
import fcntl
import glob
import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from flk.errors import UsageError
from flk.manifest.environment import environment
from flk.manifest.files import requirement_files
from flk.spec.job import Job
from flk.user.files import cache_folder
from flk_runtime.contract import pod_env, pod_layout, user_env

STATE_FOLDER: Final = Path(".flk")  # has the folders that stand for volumes: .flk/volumes/<PersistentVolumeClaim>
_SHM: Final = Path(pod_layout.SHM)
_MEMORY_PREFIX: Final = "flk-run-"


def checkpoint_place(job: Job, folder: Path) -> Path | str | None:
    """Return the folder that stands for the volume of the checkpoints, or their address in S3.

    A second run resumes from it.
    """
    if job.checkpoint is None:
        return None
    if job.checkpoint.address:
        return environment(job)[user_env.CHECKPOINT]
    return folder / STATE_FOLDER / "volumes" / str(job.checkpoint.volume) / str(job.name)


@contextlib.contextmanager
def checkpoints_of_this_run(job: Job, folder: Path) -> Iterator[None]:
    """Keep other runs on this machine out of the folder of the checkpoints. Raises UsageError if one is in it.

    Both would save there, and each would end the other's saves.
    """
    place = checkpoint_place(job, folder)
    if not isinstance(place, Path):
        yield
        return
    made(place, "checkpoints need a folder that you can write")
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(_locked(place))
        except BlockingIOError:
            raise UsageError(
                f"another flk run trains {job.name} here, and saves in {place}",
                hint="wait until it has ended, or give this one another --name",
            ) from None
        except OSError:
            pass  # a file system without locks
        yield


def packages_folder(job: Job, folder: Path, python: str, environ: Mapping[str, str]) -> Path:
    """Return the folder in which the packages of a job are installed, in the user's cache.

    It is another one for each Python, each change of the requirements or of what they name here, and each setting of
    pip. Raises UsageError for a file that cannot be read.
    """
    files = requirement_files(job.requirements, folder) if job.requirements else []
    texts = [(folder / file).read_text("utf-8") for file in files]
    named = [
        folder / word for word in (*(job.pip or []), *" ".join(texts).split()) if word.endswith((".whl", ".gz", ".zip"))
    ]
    contents = [hashlib.sha256(path.read_bytes()).hexdigest() for path in named if path.is_file()]
    sources = [path for path in job.pip or [] if (folder / path).is_dir()]  # what is in them may change with each run
    pip = sorted((name, value) for name, value in environ.items() if name.startswith("PIP_"))
    state = os.stat(python)
    made_from = [python, state.st_mtime_ns, str(folder), job.pip, texts, contents, sources and time.time(), pip]
    name = hashlib.sha256(json.dumps(made_from).encode()).hexdigest()[:16]
    return cache_folder() / "packages" / name / "venv"


def made(folder: Path, hint: str) -> Path:
    """Return a folder that exists from now on. Raises UsageError with ``hint`` if it cannot be made."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"{folder} cannot be made ({error.strerror})", hint=hint) from None
    return folder


@contextlib.contextmanager
def memory() -> Iterator[dict[str, str]]:
    """A folder in memory for the checkpoints of one run, as a variable for the launchers, where there is such a place.

    It is locked while the run lasts. Folders of runs that were killed are removed, but for empty ones: such a one may
    belong to a run that is about to lock it.
    """
    if not os.access(_SHM, os.W_OK):
        yield {}
        return
    # Not Path.glob: it raises when a folder is removed meanwhile.
    for left in {os.path.dirname(path) for path in glob.glob(f"{_SHM}/{_MEMORY_PREFIX}*/*")}:
        with contextlib.suppress(OSError), _locked(Path(left)):
            shutil.rmtree(left, ignore_errors=True)
    with (
        tempfile.TemporaryDirectory(prefix=_MEMORY_PREFIX, dir=_SHM, ignore_cleanup_errors=True) as folder,
        _locked(Path(folder)),
    ):
        yield {pod_env.MEMORY_ROOT: folder}


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder. Raises OSError if another process holds it, or the folder is somebody else's."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)
