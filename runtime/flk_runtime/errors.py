"""What this library raises when it is not the training that is wrong, but how it was set up."""

from __future__ import annotations

from flk_runtime.contract import ExitCode


class SetupError(ValueError):
    """An argument or a setting is wrong: one sentence that names it. Trying again would not help."""

    code = ExitCode.USAGE
    everywhere = False  # whether all ranks raise this very error


class DiscoveryError(SetupError):
    """The environment's variables contradict each other; the message names them and their values."""


class RendezvousError(SetupError):
    """The ranks did not come together: one did not come, or the master was not reached. The next attempt may do."""

    code = ExitCode.INFRASTRUCTURE


class CheckpointError(SetupError):
    """A snapshot does not fit what resumes from it, or its folder can't be used; the message names the folder."""


class PeerError(RuntimeError):
    """Another rank failed, and this one would have waited for it; the message names the rank and what it raised."""
