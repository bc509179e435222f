"""Exceptions of this library: SetupError and its subclasses for wrong settings, PeerError for failures of peers."""

from __future__ import annotations

from flk_runtime.contract.exit_codes import ExitCode


class SetupError(ValueError):
    """An argument or a setting is wrong, and a restart would not help. The message names it, in one sentence."""

    code = ExitCode.USAGE  # of the job, if the error ends it
    everywhere = False  # whether all ranks raise this error with the same message


class DiscoveryError(SetupError):
    """The launcher's environment variables contradict each other. The message names them and their values."""


class RendezvousError(SetupError):
    """The ranks did not find each other: one did not join, or rank 0 was not reached. A restart may help."""

    code = ExitCode.INFRASTRUCTURE


class CheckpointError(SetupError):
    """A checkpoint does not match the model, or its folder cannot be used. The message names the folder."""


class PeerError(RuntimeError):
    """Another rank failed, and this rank would have waited for it. The message names the rank and its exception."""
