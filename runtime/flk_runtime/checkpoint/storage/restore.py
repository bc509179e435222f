"""Opening a place for checkpoints, and finding the one to resume from: the last good one, whole and undamaged."""

from __future__ import annotations

import functools
import secrets
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from flk_runtime.checkpoint.storage.folder import FolderDestination, exists
from flk_runtime.checkpoint.storage.manifest import LATEST, MANIFEST, Manifest, read_pointer
from flk_runtime.contract.pod_layout import is_address
from flk_runtime.distributed import process_group
from flk_runtime.errors import CheckpointError, MismatchError, checkpoint_error, storage_access

if TYPE_CHECKING:
    from flk_runtime.checkpoint.storage.s3 import S3Destination

# A place for the checkpoints of a run. Methods raise OSError where the place cannot be used; `create` and `commit`
# raise MismatchError where another run has taken it. Each writer has a token, the same on all ranks, so that two never
# write into one checkpoint. The latest one that has called `claim` is the owner; others cannot complete checkpoints.
Destination: TypeAlias = "FolderDestination | S3Destination"

_Problem = tuple[str, OSError | None]  # what one rank finds, empty: nothing; the error of the storage itself
_NONE: _Problem = ("", None)
_SEEN_LIMIT = 5.0  # seconds in which a network file system has to show the other ranks what rank 0 has written


def open_destination(place: str) -> Destination:
    """The destination of a folder, or of an address ``s3://BUCKET/PREFIX``. Raises CheckpointError."""
    if is_address(place):
        if not place.startswith("s3://"):
            raise MismatchError(f"checkpoints in {place}: expected a folder, or s3://BUCKET/PREFIX")
        from flk_runtime.checkpoint.storage.s3 import S3Destination

        return S3Destination(place)
    return FolderDestination(Path(place).absolute())  # a script may change its working directory


def is_shared(folder: Path) -> bool:
    """Whether all ranks see the same folder. Collective."""
    if process_group.world_size() == 1:
        return True

    def mark() -> Path:
        file = folder / f".step-{secrets.token_hex(8)}.tmp"
        with storage_access(f"write to the checkpoint folder {folder}"):
            file.touch()
        return file

    def remove() -> None:
        with storage_access(f"write to the checkpoint folder {folder}"):
            file.unlink(missing_ok=True)

    file = process_group.on_main(mark)
    problem = _agree(_look_for(folder / file.name))
    process_group.on_main(remove)
    return not problem


def _look_for(mark: Path) -> _Problem:
    """Why this rank does not see a mark that rank 0 has made."""
    end = time.monotonic() + _SEEN_LIMIT
    try:
        while not exists(mark):
            if time.monotonic() >= end:
                return "it is another folder", None
            time.sleep(0.05)
    except OSError as error:
        return f"cannot read the checkpoint folder {mark.parent}: {error}", error
    return _NONE


def find_newest(destination: Destination, warn: Callable[[str], None], step: int | None = None) -> Manifest | None:
    """The manifest of the newest whole checkpoint, or of that after ``step``; None if there is none. Collective.

    A damaged one is reported by a call of ``warn`` on rank 0, and stays until a save of its step or a later one. Raises
    CheckpointError on all ranks if the storage cannot be read, since an older checkpoint would hide that, or if a newer
    flk wrote it.
    """
    steps = [step] if step is not None else process_group.on_main(functools.partial(candidates, destination, warn))
    for number in steps:
        found: Manifest | str = process_group.on_main(functools.partial(_read_manifest, destination, number))
        problem = found if isinstance(found, str) else _agree(_verify(destination, found))
        if isinstance(found, Manifest) and not problem:
            return found
        destination.damaged.add(number)
        if process_group.rank() == 0:
            warn(f"skipping the damaged checkpoint {destination.locate(number)}: {problem}")
    return None


def candidates(destination: Destination, warn: Callable[[str], None]) -> list[int]:
    """The steps of checkpoints in the order in which they are tried, from the one that the file LATEST names down.

    If it names none that is there, all are tried from the newest down. ``warn`` gets one line then, and also if there
    are newer ones, which nobody removes: a copy of the folder may be old, or somebody may have written a name.
    """
    with storage_access(f"read the checkpoints in {destination.place}"):
        steps, text = destination.steps()[::-1], destination.latest()
        if text is None:
            return steps
        try:
            last = read_pointer(text)
            if last not in steps:
                raise ValueError(f"{LATEST} names step {last}, of which there is no checkpoint")
        except ValueError as error:
            warn(f"{destination.place}: {error}; the newest whole checkpoint is used")
            return steps
        newer = [step for step in steps if step > last]
    if newer:
        warn(
            f"{destination.place}: {LATEST} names step {last}; the checkpoints of later steps, "
            f"{', '.join(map(str, newer))}, are not used"
        )
    return [step for step in steps if step <= last]


def _read_manifest(destination: Destination, step: int) -> Manifest | str:
    """The manifest, or its fault."""
    try:
        with destination.open(step, MANIFEST) as stream:
            manifest = Manifest.from_json(stream.read())
    except (FileNotFoundError, NotADirectoryError):
        return f"it has no {MANIFEST}, so it was not completed or flk did not write it"
    except (OSError, CheckpointError) as error:
        raise checkpoint_error(f"cannot read the checkpoint {destination.locate(step)}: {error}", error) from error
    except ValueError as error:
        return str(error)
    return manifest if manifest.step == step else f"its {MANIFEST} is of step {manifest.step}"


def _verify(destination: Destination, manifest: Manifest) -> _Problem:
    """The faults of this rank's share of the files."""
    for file in sorted(manifest.files)[process_group.rank() :: process_group.world_size()]:
        stored = manifest.files[file]
        try:
            found = destination.measure(manifest.step, file)
            if found.size != stored.size:
                return f"{file} has {found.size} bytes, and its manifest says {stored.size}", None
            if found != stored:
                return f"{file} has another checksum than its manifest says", None
        except FileNotFoundError:
            return f"{file} is missing", None
        except ValueError as error:
            return str(error), None
        except OSError as error:
            return f"cannot read {file} of the checkpoint {destination.locate(manifest.step)}: {error}", error
    return _NONE


def _agree(own: _Problem) -> str:
    """The first problem of any rank; empty: none has one. Raises CheckpointError on all ranks if the storage failed.

    Collective.
    """

    def choose(found: list[_Problem]) -> str:
        for text, error in found:
            if error:
                raise checkpoint_error(text, error) from error
        return next((text for text, _ in found if text), "")

    return process_group.decide(own, choose)
