"""The tree of errors that this library and its launcher raise. Each class has the kind of failure that it is.

    RuntimeFailure
    ├── SetupError               usage        an argument, a setting or the environment is wrong; also a ValueError
    │   ├── DiscoveryError       usage        the launcher's environment variables contradict each other
    │   ├── PreparationError     usage        packages or the setup command of a pod failed; other kinds if it may pass
    │   └── VersionError         usage        the other end of a connection speaks another version of the protocol
    ├── RendezvousError          rendezvous   the ranks did not find each other
    │   └── StrangerError        rendezvous   the other end of a connection does not belong to this job
    ├── CheckpointError          exception    a checkpoint could not be used; a class below this one is raised
    │   ├── MismatchError        mismatch     a checkpoint and the state do not fit each other
    │   │   └── ShardError       mismatch     a file is no whole shard of a checkpoint in memory
    │   └── StorageError         storage      a checkpoint cannot be read or written now
    │       ├── NoRoomError      storage      a shard of a checkpoint does not fit into memory
    │       └── RefusedError     storage      the launcher of another pod refuses a shard
    ├── VerificationError        difference   the first steps differ from those of the whole model in one process
    ├── PeerError                peer         another rank failed; also a RuntimeError
    ├── MessageError             exception    what was received is no message
    ├── AttemptEndedError        stopped      the attempt that wrote a shard has ended
    └── ServerDiedError          lost         the fork server has ended, and the ranks with it

Errors of a connection are also a ConnectionError. An error with a private name does not leave its module.
`flk_runtime.contract.variable` has VariableError, since it imports nothing of flk; `setting` makes a SetupError of it.

`flk_runtime.contract.failure` says what follows each kind: usage and mismatch are final, rendezvous and storage may
pass, peer is a consequence. An error that is raised because of another one keeps it as its cause: an error of the
operating system below it may say more exactly what happened (`flk_runtime.system.faults`).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from typing import ClassVar

from flk_runtime.contract.failure import Kind
from flk_runtime.contract.variable import T, Variable, VariableError


class RuntimeFailure(Exception):
    """The base class. Its text says what is wrong and why, in one sentence."""

    kind: ClassVar[Kind] = Kind.EXCEPTION
    everywhere = False  # whether all ranks raise this error with the same message


class SetupError(RuntimeFailure, ValueError):
    """An argument or a setting is wrong, and a restart would not help. The message names it."""

    kind = Kind.USAGE
    output = ""  # the last lines of a command that failed


def setting(variable: Variable[T], environ: Mapping[str, str] = os.environ) -> T:
    """Return the value of a variable in ``environ``, or its default. Raises SetupError for a wrong value."""
    try:
        return variable.read(environ)
    except VariableError as error:
        raise SetupError(str(error)) from None


class DiscoveryError(SetupError):
    """The launcher's environment variables contradict each other. The message names them and their values."""


class RendezvousError(RuntimeFailure):
    """The ranks did not find each other: one did not join, or rank 0 was not reached. A restart may help."""

    kind = Kind.RENDEZVOUS


class CheckpointError(RuntimeFailure):
    """A checkpoint could not be used: it may pass, or be final. The message names the checkpoint and says why."""


class MismatchError(CheckpointError):
    """A checkpoint does not match the state, or flk cannot save such a state. A restart would not help."""

    kind = Kind.MISMATCH


class StorageError(CheckpointError):
    """A checkpoint cannot be read or written now, or there is no memory for a copy. A restart may help."""

    kind = Kind.STORAGE


def checkpoint_error(message: str, error: Exception) -> CheckpointError:
    """The error for a checkpoint that could not be read or written because of ``error``.

    It is final if the storage refuses for good, or if what was read is no checkpoint.
    """
    refused = isinstance(error, PermissionError | NotADirectoryError | IsADirectoryError)
    passing = isinstance(error, OSError | StorageError) and not refused
    return (StorageError if passing else MismatchError)(message)


@contextlib.contextmanager
def storage_access(action: str) -> Iterator[None]:
    """Raise `checkpoint_error` for an OSError in the block. ``action`` is what cannot be done then, and where."""
    try:
        yield
    except OSError as error:
        raise checkpoint_error(f"cannot {action}: {error}", error) from error


class VerificationError(RuntimeFailure):
    """The first steps differ from those of the whole model in one process. The message names parameter and cause."""

    kind = Kind.DIFFERENCE
    everywhere = True


class PeerError(RuntimeFailure, RuntimeError):
    """Another rank failed, and this rank would have waited for it. The message names the rank and its exception."""

    kind = Kind.PEER
