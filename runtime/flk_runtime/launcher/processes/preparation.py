"""Preparation of a pod before its ranks start: packages are installed and the setup command runs, once for each pod.

The packages go into a virtual environment of the job, in front of the image's, which stay as they are. Only jobs with
these options have this module.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import re
import selectors
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
from flk_runtime.launcher.settings import Settings
from flk_runtime.launcher.signals import STACKS_SIGNAL, Wakeup, exit_code_of_signal
from flk_runtime.system import host

_DELAYS = (5.0, 10.0, 20.0, 40.0, 60.0)  # seconds before pip asks an index again that it cannot reach
_KEPT = 200  # last lines of a command, in which its reason is looked for
_SHOWN = 20  # of them that a record has
_GRACE = 2.0  # seconds between SIGTERM and SIGKILL for a command
_SITES = ("site-packages", "dist-packages")
_UNREACHABLE = re.compile(
    r"connection broken by|Max retries exceeded|Could not fetch URL|Temporary failure|timed out"
    r"|Connection (?:refused|reset)|is unreachable|\b(?:429|50[0234]) (?:Client|Server) Error"
    r"|HTTP error (?:429|50[0234])"
)
_FINAL = re.compile(r"from versions: (?!none)|DO NOT MATCH THE HASHES|--require-hashes")


class PreparationError(SetupError):
    """The pod could not be prepared. The message says what failed, and ``output`` has its last lines."""

    def __init__(self, message: str, lines: list[str] | None = None, kind: Kind = Kind.USAGE) -> None:
        super().__init__(message)
        self.output = "\n".join((lines or [])[-_SHOWN:])
        self.kind = kind  # type: ignore[misc]


class _Stopped(Exception):
    """A signal has stopped this launcher."""


class Preparation:
    """Installs the packages and runs the setup command of one pod."""

    def __init__(self, settings: Settings, wakeup: Wakeup) -> None:
        self._settings = settings
        self._wakeup = wakeup
        self._deadline = time.monotonic() + settings.deadline if settings.deadline else None
        packages = Path(settings.work, pod_layout.PACKAGES)
        self._packages = Path(os.environ.get(pod_env.PACKAGES) or packages)
        self._marker = Path(os.environ.get(pod_env.SETUP_DONE) or packages.parent / "setup" / "done")

    def run(self) -> Settings:
        """Prepare this pod, or take over what an earlier launcher has prepared. Raises PreparationError.

        Returns the settings with the time that is left until the deadline. A signal that stops the launcher ends this
        process.
        """
        try:
            self._run()
        except _Stopped as stopped:
            os._exit(exit_code_of_signal(stopped.args[0]))
        if self._deadline is None:
            return self._settings
        return replace(self._settings, deadline=max(0.001, self._deadline - time.monotonic()))

    def _run(self) -> None:
        requirements = pod_env.PIP.read(os.environ).splitlines()
        file = pod_env.REQUIREMENTS.read(os.environ)
        if file:
            requirements += ["-r", file]
        if requirements:
            done = self._packages / "installed"
            with _once(done) as needed:
                if needed:
                    self._install(requirements)
                    done.touch()
            self._use()
        command = pod_env.SETUP.read(os.environ)
        if command:
            with _once(self._marker) as needed:
                if needed:
                    self._setup(command)
                    self._marker.touch()

    def _install(self, requirements: list[str]) -> None:
        begin = time.monotonic()
        self._log("installing packages: " + re.sub("//[^/@ ]+@", "//****@", " ".join(requirements)))
        python = self._environment()
        words = [python, "-m", "pip", "install", "--no-input", "--disable-pip-version-check", "--progress-bar", "off"]
        if os.environ.get("HOME") == self._settings.work and "PIP_CACHE_DIR" not in os.environ:
            words.append("--no-cache-dir")  # it would be in the pod, where nothing reads it again
        delays = itertools.chain(_DELAYS, itertools.repeat(_DELAYS[-1]))
        while True:
            code, lines = self._call([*words, *requirements], "pip")
            if code == 0:
                self._log(f"installed packages in {time.monotonic() - begin:.0f} s")
                return
            broken = next((line for line in lines if _UNREACHABLE.search(line)), None)
            if broken is None or any(_FINAL.search(line) for line in lines):
                raise PreparationError(f"pip cannot install the packages: {_reason(lines)}", lines)
            waited = time.monotonic() - begin
            if waited > self._settings.join_timeout:
                text = f"pip could not reach the index of packages for {waited:.0f} s: {broken}"
                raise PreparationError(text, lines, Kind.UNPREPARED)
            delay = next(delays)
            self._log(f"installing packages: pip cannot reach the index; trying again in {delay:.0f} s")
            self._wait(delay)

    def _environment(self) -> str:
        """Make the virtual environment, which sees the packages of this Python. Returns its Python."""
        folder = self._packages
        shutil.rmtree(folder, ignore_errors=True)
        try:
            import venv

            venv.EnvBuilder(system_site_packages=True, symlinks=True).create(folder)
        except (ImportError, OSError, subprocess.SubprocessError) as error:
            raise PreparationError(f"{sys.executable} cannot make a virtual environment: {error}") from error
        # The image's Python may be in a virtual environment itself, whose packages the new one would not see.
        seen = [path for path in sys.path if path.endswith(_SITES)]
        (self._site / "image.pth").write_text("".join(f"{path}\n" for path in seen))
        python = str(folder / "bin" / "python")
        for words in (["-c", "import pip"], ["-m", "ensurepip"]):
            if subprocess.run([python, *words], capture_output=True, stdin=subprocess.DEVNULL).returncode == 0:
                return python
        raise PreparationError("the image has no pip, with which packages are installed, and no ensurepip")

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
        environ = {**os.environ, "PIP_USER": "0", "PYTHONUNBUFFERED": "1"}
        for variable in ("PIP_TARGET", "PIP_PREFIX"):
            environ.pop(variable, None)
        if environ.get("PIP_RETRIES") == "0":
            environ["PIP_RETRIES"] = "1"  # else pip does not say that it could not connect
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
                for line in self._lines(process, name):
                    line = hidden(line, self._settings.secrets)
                    lines.append(line)
                    self._log(f"{name}: {line}")
                return process.wait(), list(lines)  # what it has started in the background stays
            except BaseException:
                _end(process)
                raise

    def _lines(self, process: subprocess.Popen[bytes], name: str) -> Iterator[str]:
        """Yield the lines of a command until it ends."""
        assert process.stdout  # noqa: S101
        rest = b""
        while True:
            quiet = time.monotonic() + self._settings.join_timeout
            while not self._wait(1.0, process.stdout.fileno()):
                if time.monotonic() > quiet:
                    what = "pip" if name == "pip" else "the setup command"
                    text = f"{what} wrote nothing for {self._settings.join_timeout:g} s"
                    raise PreparationError(text, kind=Kind.UNPREPARED)
                if process.poll() is not None:
                    break  # a process that it has left behind keeps the pipe open
            else:
                data = os.read(process.stdout.fileno(), 1 << 16)
                *whole, rest = (rest + data).replace(b"\r", b"\n").split(b"\n")
                yield from (line.decode(errors="replace").rstrip() for line in whole if line.strip())
                if data:
                    continue
            if rest.strip():
                yield rest.decode(errors="replace")
            return

    def _wait(self, seconds: float, file: int | None = None) -> bool:
        """Wait until ``file`` can be read; returns whether it can. A signal ends this process, the deadline raises."""
        if self._deadline is not None:
            seconds = min(seconds, max(0.0, self._deadline - time.monotonic()))
        self._wakeup.starting = False
        try:
            with selectors.DefaultSelector() as selector:
                selector.register(self._wakeup.socket, selectors.EVENT_READ)
                if file is not None:
                    selector.register(file, selectors.EVENT_READ)
                ready = {key.fd for key, _ in selector.select(seconds)}
        finally:
            self._wakeup.starting = True
        self._wakeup.clear()
        stops = [number for number in self._wakeup.signals if number != STACKS_SIGNAL]
        self._wakeup.signals.clear()
        if stops:
            raise _Stopped(stops[0])
        if self._deadline is not None and time.monotonic() >= self._deadline:
            text = f"it passed while the pod was prepared, {self._settings.deadline:g} s since the launcher started"
            raise PreparationError(text, kind=Kind.DEADLINE)
        return file in ready

    def _log(self, text: str) -> None:
        prefix = log_format.LAUNCHER_PREFIX.format(index=self._settings.pod_in_job)
        host.write_all(2, f"{prefix}{text}\n".encode(errors="replace"))


@contextlib.contextmanager
def _once(marker: Path) -> Iterator[bool]:
    """Whether ``marker`` is not there yet; no other launcher of this machine prepares the same meanwhile."""
    marker.parent.parent.mkdir(parents=True, exist_ok=True)
    with open(f"{marker.parent}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        marker.parent.mkdir(exist_ok=True)
        yield not marker.exists()


def _reason(lines: list[str]) -> str:
    """The reason that pip gives for its end."""
    errors = [line for line in lines if line.startswith(("ERROR: ", "error: "))]
    chosen = next((line for line in errors if "No matching distribution" in line or "HASH" in line), None)
    found = chosen or (errors or lines or ["it says nothing"])[-1]
    return found.partition(": ")[2] or found if found in errors else found


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a command and what it has started."""
    for number, timeout in ((signal.SIGTERM, _GRACE), (signal.SIGKILL, None)):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout)
            if number == signal.SIGKILL:
                return
