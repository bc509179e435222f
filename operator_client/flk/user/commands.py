"""Commands: the commands of flk and kubectl that messages suggest, each with its cluster and its namespace."""

from __future__ import annotations

import os.path  # importing pathlib would add a fifth to the time of `flk --version`
import shlex
import sys

from flk_runtime.contract.values import dataclass, field


@dataclass(frozen=True)
class Connection:
    """The cluster and the user that a command line chooses, as kubectl's options do; empty for the defaults."""

    context: str = ""
    kubeconfig: str = ""
    user: str = ""  # to impersonate

    @property
    def flags(self) -> str:
        """The options with which kubectl and flk make the same connection, each after a blank; empty for none."""
        pairs = [("--context", self.context), ("--kubeconfig", self.kubeconfig), ("--as", self.user)]
        return "".join(f" {flag} {shlex.quote(value)}" for flag, value in pairs if value)


@dataclass(frozen=True)
class Commands:
    """Makes the commands for one namespace of one cluster."""

    namespace: str = ""
    connection: Connection = field(default_factory=Connection)
    job: tuple[str, str] = ("", "")  # the name of a job, and the word for it where others may have the name

    def flk(self, verb: str, job: str = "", *, namespace: str | None = None) -> str:
        """Return the flk command that does something with a job of the namespace, or of another one."""
        job = self.job[1] if job == self.job[0] else job
        words = [program_name(), verb, *([job] if job else []), "-n", namespace or self.namespace]
        return " ".join(words) + self.connection.flags

    def again(self, job: str, queue: str, options: str = "") -> str:
        """Return how a job runs again, with more options. ``queue``: that of the job, whose pods Kueue has changed."""
        if queue:
            return f"{self.flk('delete', job)} and a new submission" + (f" with {options}" if options else "")
        return f"{self.flk('restart', job)} {options}".rstrip()

    def kubectl(self, words: str, *, namespaced: bool = True) -> str:
        """Return a kubectl command in the namespace, or (not ``namespaced``) one about the cluster."""
        return f"kubectl {words}{f' -n {self.namespace}' if namespaced else ''}{self.connection.flags}"


def program_name() -> str:
    """Return the command as the user has typed it: ``flk``, or ``kubectl flk`` for the kubectl plugin."""
    return "kubectl flk" if os.path.splitext(os.path.basename(sys.argv[0]))[0] == "kubectl-flk" else "flk"
