"""Preparation of a pod before its ranks start: packages are installed and the setup command runs, once for each pod.

The packages go into a virtual environment of the job, in front of the image's, which stay as they are. Only jobs with
these options have this module.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib.util
import math
import os
import re
import select
import shutil
import signal
import site
import subprocess
import sys
import sysconfig
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from flk_runtime.contract import log_format, pod_env, pod_layout
from flk_runtime.contract.failure import Kind
from flk_runtime.contract.secrets import hidden
from flk_runtime.errors import SetupError
from flk_runtime.launcher.control import STOP_SIGNALS
from flk_runtime.launcher.settings import Settings
from flk_runtime.system import host

_RETRIES = "10"  # times that pip asks an index again that does not answer, with pauses: for about four minutes
_UNREACHED = re.compile("after connection broken by|Could not fetch URL")  # what pip says of an index that is not there
# Reasons that an index did not cause, although pip may have asked one in vain before.
_FINAL = re.compile("from versions: (?!none)|DO NOT MATCH THE HASHES|--require-hashes|subprocess-exited-with-error")
_KEPT = 200  # last lines of a command, in which its reason is looked for
_SHOWN = 20  # of them that a record has
_POLL = 1.0  # seconds
_SITES = ("site-packages", "dist-packages")


class PreparationError(SetupError):
    """The pod could not be prepared. The message says what failed, and ``output`` has its last lines."""

    def __init__(self, message: str, lines: list[str] | None = None, kind: Kind = Kind.USAGE) -> None:
        super().__init__(message)
        self.output = "\n".join((lines or [])[-_SHOWN:])
        self.kind = kind  # type: ignore[misc]


class Preparation:
    """Installs the packages and runs the setup command of one pod."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._deadline = time.monotonic() + (settings.deadline or math.inf)
        packages = Path(settings.work, pod_layout.PACKAGES)
        self._packages = Path(os.environ.get(pod_env.PACKAGES) or packages)
        self._marker = Path(os.environ.get(pod_env.SETUP_DONE) or packages.parent / "setup" / "done")

    def run(self) -> Settings:
        """Prepare this pod, unless an earlier launcher has prepared it. Raises PreparationError.

        Returns the settings with the time that is left until the deadline. A signal ends this process and the command
        that runs.
        """
        requirements = pod_env.PIP.read(os.environ).splitlines()
        file = pod_env.REQUIREMENTS.read(os.environ)
        if file:
            requirements += ["-r", file]
        if requirements:
            with _once(self._packages / "installed") as needed:
                if needed:
                    self._install(requirements)
            self._use()
        command = pod_env.SETUP.read(os.environ)
        if command:
            with _once(self._marker) as needed:
                if needed:
                    self._setup(command)
        if not self._settings.deadline:
            return self._settings
        return replace(self._settings, deadline=max(0.001, self._deadline - time.monotonic()))

    def _install(self, requirements: list[str]) -> None:
        begin = time.monotonic()
        self._log("installing packages: " + re.sub("//[^/@ ]+@", "//****@", " ".join(requirements)))
        python = self._environment()
        words = [python, "-m", "pip", "install", "--no-input", "--disable-pip-version-check", "--progress-bar", "off"]
        code, lines = self._call([*words, *requirements], "pip")
        if code:
            unreached = [] if any(map(_FINAL.search, lines)) else list(filter(_UNREACHED.search, lines))
            errors = [line for line in lines if line.startswith(("ERROR: ", "error: "))]
            said = (unreached[:1] or errors or lines or ["it says nothing"])[-1]
            said = re.sub("^(ERROR|error): ", "", said)
            kind = Kind.UNPREPARED if unreached else Kind.USAGE
            raise PreparationError(f"pip cannot install the packages: {said}", lines, kind)
        self._log(f"installed packages in {time.monotonic() - begin:.0f} s")

    def _environment(self) -> str:
        """Make the virtual environment, which sees the packages of this Python. Returns its Python."""
        folder = self._packages
        shutil.rmtree(folder, ignore_errors=True)
        try:
            import venv

            venv.EnvBuilder(system_site_packages=True, symlinks=True).create(folder)
            # The image's Python may be in a virtual environment itself, whose packages the new one would not see.
            seen = [path for path in sys.path if path.endswith(_SITES)]
            (self._site / "image.pth").write_text("".join(f"{path}\n" for path in seen))
            python = str(folder / "bin" / "python")
            if importlib.util.find_spec("pip") is None:
                # Once the image's packages are seen: ensurepip would put its old setuptools in front of theirs.
                subprocess.run([python, "-m", "ensurepip"], check=True, capture_output=True, stdin=subprocess.DEVNULL)
        except (ImportError, OSError, subprocess.SubprocessError) as error:
            raise PreparationError(f"{sys.executable} cannot make a virtual environment with pip: {error}") from error
        return python

    @property
    def _site(self) -> Path:
        return Path(sysconfig.get_path("purelib", "posix_prefix", {"base": str(self._packages)}))

    def _use(self) -> None:
        """Let this process, its ranks and all that they start find the packages and their programs."""
        before = list(sys.path)
        site.addsitedir(str(self._site))  # and what its files .pth name, as for packages that are installed by -e
        added = [path for path in sys.path if path not in before]
        first = next((i for i, path in enumerate(before) if path.endswith(_SITES)), len(before))
        sys.path[:] = [*before[:first], *added, *before[first:]]
        for name, path in (("PYTHONPATH", os.pathsep.join(added)), ("PATH", str(self._packages / "bin"))):
            given = os.environ.get(name, "")
            pair = (path, given) if name == "PATH" else (given, path)
            os.environ[name] = os.pathsep.join(filter(None, pair))

    def _setup(self, command: str) -> None:
        begin = time.monotonic()
        self._log(f"running the setup command: {command.splitlines()[0]}")
        code, lines = self._call(["/bin/sh", "-c", command], "setup")
        if code:
            said = f": {lines[-1]}" if lines else ""
            ended = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
            raise PreparationError(f"the setup command {ended}{said}", lines)
        self._log(f"the setup command has ended after {time.monotonic() - begin:.0f} s")

    def _call(self, words: list[str], name: str) -> tuple[int, list[str]]:
        """Run a command, whose output goes to stderr. Returns its exit code and its last lines."""
        environ = {"PIP_RETRIES": _RETRIES, **os.environ, "PIP_USER": "0", "PYTHONUNBUFFERED": "1"}
        for variable in ("PIP_TARGET", "PIP_PREFIX"):
            environ.pop(variable, None)
        parent = os.getpid()
        lines: deque[str] = deque(maxlen=_KEPT)
        with subprocess.Popen(
            words,
            cwd=self._settings.work,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=lambda: host.die_with_parent(parent),
        ) as process:
            try:
                with _killed_by_signals(process.pid):
                    for line in self._lines(process, name):
                        line = hidden(line, self._settings.secrets)
                        lines.append(line)
                        self._log(f"{name}: {line}")
                    return process.wait(), list(lines)  # what it has started in the background stays
            except BaseException:
                host.kill_group(process.pid)
                raise

    def _lines(self, process: subprocess.Popen[bytes], name: str) -> Iterator[str]:
        """Yield the lines of a command until it ends. What it leaves in the background may keep its output open."""
        assert process.stdout  # noqa: S101
        rest, heard, limit = b"", time.monotonic(), self._settings.join_timeout
        while True:
            ready = select.select([process.stdout], [], [], min(_POLL, limit))[0]
            data = os.read(process.stdout.fileno(), 1 << 16) if ready else b""
            if data:
                heard = time.monotonic()
                *whole, rest = (rest + data).replace(b"\r", b"\n").split(b"\n")
                yield from (line.decode(errors="replace").rstrip() for line in whole if line.strip())
            elif ready or process.poll() is not None:
                break
            now = time.monotonic()
            if now >= self._deadline:
                text = f"it passed while the pod was prepared, {self._settings.deadline:g} s since the launcher started"
                raise PreparationError(text, kind=Kind.DEADLINE)
            if now - heard > limit:
                what = "pip" if name == "pip" else "the setup command"
                raise PreparationError(f"{what} wrote nothing for {limit:g} s", kind=Kind.UNPREPARED)
        if rest.strip():
            yield rest.decode(errors="replace")

    def _log(self, text: str) -> None:
        prefix = log_format.LAUNCHER_PREFIX.format(index=self._settings.pod_in_job)
        host.write_all(2, f"{prefix}{text}\n".encode(errors="replace"))


@contextlib.contextmanager
def _killed_by_signals(group: int) -> Iterator[None]:
    """Kill a process group before a signal ends this process: the kernel would end its first process only."""
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}

    def end(number: int, frame: object) -> None:
        host.kill_group(group)
        signal.signal(number, before[signal.Signals(number)])
        os.kill(os.getpid(), number)

    for number in before:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _once(marker: Path) -> Iterator[bool]:
    """Whether ``marker`` is not there yet; it is made at the end. Other launchers of this machine wait meanwhile."""
    marker.parent.parent.mkdir(parents=True, exist_ok=True)
    with open(f"{marker.parent}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        marker.parent.mkdir(exist_ok=True)
        needed = not marker.exists()
        yield needed
        marker.touch()
