"""Finding the checkpoint to resume from: the last good one in storage whose files are all there and undamaged."""

from __future__ import annotations

import functools
import secrets
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from flk_runtime.checkpoint.storage.destination import Destination
from flk_runtime.checkpoint.storage.manifest import MANIFEST, Manifest
from flk_runtime.distributed import process_group
from flk_runtime.errors import CheckpointError, StorageError, checkpoint_error

_SEEN_LIMIT = 5.0  # seconds in which a network file system has to show the other ranks what rank 0 has written


class Found(NamedTuple):
    """A whole checkpoint in storage."""

    step: int
    manifest: Manifest


def is_shared(destination: Destination) -> bool:
    """Whether all ranks see the same folder. Collective."""
    if process_group.world_size() == 1:
        return True

    def mark() -> str:
        token = secrets.token_hex(8)
        try:
            destination.make_mark(token)
        except OSError as error:
            message = f"cannot write to the checkpoint folder {destination.place}: {error}"
            raise checkpoint_error(message, error) from error
        return token

    token = process_group.on_main(mark)
    end = time.monotonic() + _SEEN_LIMIT
    while not (seen := destination.has_mark(token)) and time.monotonic() < end:
        time.sleep(0.05)
    shared = process_group.all_true(seen)()
    if process_group.rank() == 0:
        destination.remove_mark(token)
    return shared


def find_newest(destination: Destination, warn: Callable[[str], None]) -> Found | None:
    """The newest whole checkpoint; None if there is none. Collective.

    A damaged one is reported by a call of ``warn`` on rank 0, and set aside. Raises CheckpointError on all ranks if the
    storage cannot be read, since an older checkpoint would hide that, or if a newer flk wrote the checkpoint.
    """
    for step in process_group.on_main(functools.partial(_candidates, destination)):
        text, problem = process_group.on_main(functools.partial(_read_manifest, destination, step))
        if not problem:
            manifest = Manifest.from_json(text)
            problem = _agree(_verify(destination, manifest))
            if not problem:
                return Found(step, manifest)
        if process_group.rank() == 0:
            place = destination.locate(step)
            warn(f"skipping the damaged checkpoint {place}, renamed to {destination.set_aside(step)}: {problem}")
    return None


def _candidates(destination: Destination) -> list[int]:
    """Steps from the last good one down. A checkpoint after it was not completed."""
    try:
        steps, last = destination.steps(), destination.last_good()
    except OSError as error:
        raise checkpoint_error(f"cannot read the checkpoints in {destination.place}: {error}", error) from error
    return [step for step in reversed(steps) if last is None or step <= last]


def _read_manifest(destination: Destination, step: int) -> tuple[bytes, str]:
    """The manifest, and what is wrong with it."""
    try:
        with destination.open(step, MANIFEST) as stream:
            text = stream.read()
        manifest = Manifest.from_json(text)
    except FileNotFoundError:
        return b"", f"it has no {MANIFEST}, so it was not completed or flk did not write it"
    except NotADirectoryError:
        return b"", "it is not a folder, so flk did not write it"
    except (OSError, CheckpointError) as error:
        message = f"cannot read the checkpoint {destination.locate(step)}: {error}"
        raise checkpoint_error(message, error) from error
    except ValueError as error:
        return b"", str(error)
    return text, "" if manifest.step == step else f"its {MANIFEST} is of step {manifest.step}"


def _verify(destination: Destination, manifest: Manifest) -> tuple[str, bool]:
    """What is wrong with this rank's share of the files, and whether the storage itself failed."""
    for file in sorted(manifest.files)[process_group.rank() :: process_group.world_size()]:
        stored = manifest.files[file]
        try:
            size = destination.size(manifest.step, file)
            if size != stored.size:
                return f"{file} has {size} bytes, and its manifest says {stored.size}", False
            if destination.measure(manifest.step, file) != stored:
                return f"{file} has another checksum than its manifest says", False
        except FileNotFoundError:
            return f"{file} is missing", False
        except OSError as error:
            return f"cannot read {file} of the checkpoint {destination.locate(manifest.step)}: {error}", True
    return "", False


def _agree(own: tuple[str, bool]) -> str:
    """The first problem of any rank. Raises CheckpointError on all ranks if the storage failed. Collective."""
    found: list[Any] | None = process_group.gather(own)

    def choose() -> str:
        for problem, failed in found or ():
            if failed:
                raise StorageError(problem)
        return next((problem for problem, _ in found or () if problem), "")

    return process_group.on_main(choose)
