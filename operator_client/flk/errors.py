"""The errors that flk raises, and the exit code of each.

    FlkError                    1   the base class: what went wrong, why, and what to do next
    ├── UsageError              2   the command line or the job file is wrong; nothing was created
    ├── ApiError                1   the API server refused, failed or did not answer
    │   ├── NoConfigError       1   no usable kubeconfig, context or credentials
    │   │   └── NoKubeconfigError 1 there is no kubeconfig at all
    │   ├── UnreachableError    1   no answer from the API server
    │   ├── ForbiddenError      1   no permission; names the verb and the resource
    │   ├── MissingApiError     1   the cluster does not serve this kind of objects
    │   └── ConflictError       1   an object of that name exists already
    ├── UnreadableError         1   an object that others may write has a value that cannot be
    ├── JobNotFoundError      102   no job of that name
    ├── JobFailedError          *   the job failed
    ├── JobStuckError           *   the job cannot go on, and that does not resolve by itself
    ├── JobDeletedError       103   the job was deleted while flk watched it
    └── WaitTimeoutError      124   the time that flk may wait is over
        └── JobRunningError   101   the job has not ended, and flk was told not to wait

*: the code says because of what: 2 the environment or an option, 100 the user's code, 104 the infrastructure, and of a
job that failed 124 its deadline.

`flk.__main__` prints an error as an `error:` line and a `hint:` line, and exits with its code. Ctrl-C exits with 130.
Any other exception is a bug of flk: it ends in a traceback, with code 1.
"""

from __future__ import annotations

from collections.abc import Sequence

from flk_runtime.contract import ExitCode


class FlkError(Exception):
    """The base class. Its text says what went wrong and why, in one line; ``hint`` says what to do next."""

    code = ExitCode.ERROR
    mistakes: Sequence[FlkError] = ()  # of one request, if there are several; each is printed by itself

    def __init__(self, message: str, *, hint: str = "", code: ExitCode | None = None) -> None:
        super().__init__(message)
        self.hint = hint
        if code is not None:
            self.code = code


class UsageError(FlkError):
    """The command line, the job file or a value in it is wrong. Nothing was created."""

    code = ExitCode.USAGE

    @classmethod
    def of(cls, errors: Sequence[UsageError]) -> UsageError:
        """Return one error for all mistakes in a request. Its text has a line for each."""
        mistakes = [mistake for error in errors for mistake in error.mistakes or [error]]
        if len(mistakes) == 1:
            return errors[0]
        together = cls("\n".join(map(str, mistakes)))
        together.mistakes = mistakes
        return together


class ApiError(FlkError):
    """The API server refused, failed or did not answer. ``status`` is its HTTP status, 0 without one.

    ``causes`` are the API's own words for why it refused, such as ``NamespaceTerminating``.
    """

    def __init__(self, message: str, *, hint: str = "", status: int = 0, causes: Sequence[str] = ()) -> None:
        super().__init__(message, hint=hint)
        self.status = status
        self.causes = causes

    @property
    def is_outage(self) -> bool:
        """Whether the same request may succeed later: the server did not answer, is overloaded or failed."""
        return isinstance(self, UnreachableError) or self.status == 429 or self.status >= 500


class NoConfigError(ApiError):
    """No usable kubeconfig, context or credentials."""


class NoKubeconfigError(NoConfigError):
    """There is no kubeconfig at all, so that this may be a machine without a cluster."""


class UnreachableError(ApiError):
    """The API server did not answer."""


class ForbiddenError(ApiError):
    """The user may not do this; the message names the verb and the resource."""


class MissingApiError(ApiError):
    """The cluster does not serve this kind of objects, or only in versions (``served``) that flk does not know."""

    def __init__(self, message: str, *, hint: str = "", status: int = 0, served: Sequence[str] = ()) -> None:
        super().__init__(message, hint=hint, status=status)
        self.served = served


class ConflictError(ApiError):
    """An object of that name exists already, and this request has not created it."""

    def __init__(self, message: str, *, hint: str = "", status: int = 409) -> None:
        super().__init__(message, hint=hint, status=status)


class UnreadableError(FlkError):
    """An object of the cluster has a value that it cannot have, so that nothing follows from it."""


class JobNotFoundError(FlkError):
    """There is no job of that name."""

    code = ExitCode.NOT_FOUND


class JobFailedError(FlkError):
    """The job failed. ``code`` says because of what: 2, 100, 104 or 124."""

    code = ExitCode.TRAINING


class JobStuckError(FlkError):
    """The job cannot go on, and that does not resolve by itself. ``code`` says because of what: 2, 100 or 104."""

    code = ExitCode.INFRASTRUCTURE


class JobDeletedError(FlkError):
    """The job was deleted while flk watched it."""

    code = ExitCode.CANCELLED


class WaitTimeoutError(FlkError):
    """The job has not ended in the time that flk was told to wait."""

    code = ExitCode.TIMEOUT


class JobRunningError(WaitTimeoutError):
    """The job has not ended, and flk was told not to wait."""

    code = ExitCode.RUNNING
