"""The programs flk, kubectl and helm as tests call them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import pytest

import flk
from flk_runtime.contract import user_env
from tests.support.processes import Result, checked
from tests.support.requirements import unavailable

# Options of `flk submit` for a job whose script does not use torch: its pods do not import it, which would take most of
# their processor time.
WITHOUT_TORCH = ["--env", f"{user_env.START}=spawn"]
RUN_CLI = 300  # seconds that a command may take unless a test says otherwise

# What the fixture `run` is: it runs a command line in this process, and gives its exit code, stdout and stderr.
Run = Callable[..., tuple[int, str, str]]


class Flk:
    """The command line as a user has it: a process of its own, in a folder.

    ``home`` replaces the user's home folder and ``kubeconfig`` the user's configuration; no variable that begins with
    FLK_ or KUBE reaches the command except those given here.
    """

    def __init__(self, folder: Path, *, kubeconfig: Path | None = None, home: Path | None = None) -> None:
        self.folder = folder
        self.env = {k: v for k, v in os.environ.items() if not k.startswith(("FLK_", "KUBE", "XDG_"))}
        self.env |= {"NO_COLOR": "1", "OMP_NUM_THREADS": "1"}
        self.env |= {"KUBECONFIG": str(kubeconfig)} if kubeconfig else {}
        self.env |= {"HOME": str(home)} if home else {}
        self.program = [sys.executable, "-m", "flk"]
        self._started: list[subprocess.Popen[str]] = []

    def start(self, *args: str, cwd: Path | None = None, env: Mapping[str, str] = {}) -> subprocess.Popen[str]:
        """Start the command with pipes and in a session of its own, for tests that signal or follow it."""
        process = subprocess.Popen(
            [*self.program, *args],
            cwd=cwd or self.folder,
            env=self.env | dict(env),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self._started.append(process)
        return process

    def __call__(
        self, *args: str, cwd: Path | None = None, env: Mapping[str, str] = {}, timeout: float = RUN_CLI
    ) -> Result:
        process = self.start(*args, cwd=cwd, env=env)
        try:
            stdout, stderr = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            stdout, stderr = process.communicate()
            pytest.fail(f"flk {' '.join(args)} took more than {timeout} s:\n{stdout}\n{stderr}", pytrace=False)
        return Result(process.returncode, stdout, stderr)

    def close(self) -> None:
        """Kill the commands that still run, and close their pipes."""
        for process in self._started:
            process.kill()
            with process:  # closes its pipes and waits
                pass


# The code of a command's process. Its streams are files, and nothing of the server's folder and environment is left.
BOOT = """
import os, sys
os.setsid()
os.environ.clear()
os.environ.update(environment)
os.chdir(folder)
for descriptor, path, flags in ((0, os.devnull, os.O_RDONLY), (1, stdout, os.O_WRONLY), (2, stderr, os.O_WRONLY)):
    os.dup2(os.open(path, flags), descriptor)
sys.argv = [program, *arguments]
exec(before)
from flk.__main__ import main
sys.exit(main())
"""


class ForkedFlk(Flk):
    """The command line, called in processes that are forked from one that has imported it.

    A call takes a third of the processor time of a new interpreter. ``start`` starts a new one, as for a user. A test
    may set ``before``, which the process of a call executes first.
    """

    before = ""

    def __init__(self, server: ForkServerContext, folder: Path, *, kubeconfig: Path, home: Path) -> None:
        super().__init__(folder, kubeconfig=kubeconfig, home=home)
        self._server = server

    def __call__(
        self, *args: str, cwd: Path | None = None, env: Mapping[str, str] = {}, timeout: float = RUN_CLI
    ) -> Result:
        with tempfile.TemporaryDirectory() as folder:
            outputs = [Path(folder) / name for name in ("stdout", "stderr")]
            for output in outputs:
                output.touch()
            names = {
                "environment": self.env | dict(env),
                "folder": str(cwd or self.folder),
                "stdout": str(outputs[0]),
                "stderr": str(outputs[1]),
                "program": str(Path(flk.__path__[0], "__main__.py")),
                "arguments": args,
                "before": self.before,
            }
            process = self._server.Process(target=exec, args=(BOOT, names))
            process.start()
            process.join(timeout)
            late = process.is_alive()
            process.kill()
            process.join()
            stdout, stderr = (output.read_text(errors="replace") for output in outputs)
        if late:
            pytest.fail(f"flk {' '.join(args)} took more than {timeout} s:\n{stdout}\n{stderr}", pytrace=False)
        return Result(process.exitcode or 0, stdout, stderr)


class Kubectl:
    """kubectl with this kubeconfig: call it with arguments and get its stdout. A failure fails the test."""

    def __init__(self, kubeconfig: Path) -> None:
        self.kubeconfig = kubeconfig

    def __call__(self, *args: str, stdin: object = None, timeout: float = 120) -> str:
        """``stdin`` is text, or an object that is passed as JSON (a manifest for ``apply -f -``)."""
        text = stdin if stdin is None or isinstance(stdin, str) else json.dumps(stdin)
        return checked(["kubectl", "--kubeconfig", str(self.kubeconfig), *args], stdin=text, timeout=timeout)

    def json(self, *args: str) -> Any:
        return json.loads(self(*args, "-o", "json"))


def helm(*args: str, timeout: float = 120) -> Result:
    """Run helm, which reads no kubeconfig unless ``args`` name one. The test is skipped where helm is not installed."""
    if not shutil.which("helm"):
        unavailable("helm is not installed")
    environ = {name: value for name, value in os.environ.items() if not name.startswith("HELM_KUBE")}
    environ.pop("HELM_NAMESPACE", None)
    environ["KUBECONFIG"] = os.devnull
    done = subprocess.run(["helm", *args], capture_output=True, text=True, timeout=timeout, env=environ)
    return Result(done.returncode, done.stdout, done.stderr)


def status(flk: Any, job: str) -> dict[str, Any]:
    """What `flk status` says of a job, as data. ``flk`` is the fixture."""
    state: dict[str, Any] = json.loads(flk("status", job, "-o", "json").stdout)
    return state
