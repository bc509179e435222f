"""Preparation of a pod before its ranks start: packages are installed and the setup command runs, once for each pod.

The packages go into a virtual environment of the job, in front of the image's, which stay as they are. Only jobs with
these options have this module.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib.util
import os
import shutil
import site
import subprocess
import sys
import sysconfig
import time
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path

from flk_runtime.contract import log_format, pod_env, pod_layout
from flk_runtime.contract.failure import Kind
from flk_runtime.contract.secrets import hidden
from flk_runtime.errors import SetupError
from flk_runtime.launcher.control import Wakeup
from flk_runtime.launcher.settings import Settings
from flk_runtime.system import host

_RETRIES = "10"  # times that pip asks an index again that does not answer, with pauses: for about four minutes
# pip takes an empty value for none. With these of an image, it would install elsewhere.
_OF_IMAGE = {"PIP_USER": "0", "PIP_TARGET": "", "PIP_PREFIX": ""}
_SHOWN = 20  # last lines of a command that a record has
_POLL = 0.2  # seconds between two looks at a command
_SITES = ("site-packages", "dist-packages")


class PreparationError(SetupError):
    """The pod could not be prepared. The message says what failed, and ``output`` has its last lines."""

    def __init__(self, message: str, lines: Sequence[str] = (), kind: Kind = Kind.USAGE) -> None:
        super().__init__(message)
        self.output = "\n".join(lines)
        self.kind = kind  # type: ignore[misc]


class Preparation:
    """Installs the packages and runs the setup command of one pod."""

    def __init__(self, settings: Settings, wakeup: Wakeup) -> None:
        self._settings = settings
        self._wakeup = wakeup
        self._deadline = time.monotonic() + settings.seconds_left(time.time())
        packages = Path(settings.work, pod_layout.PACKAGES)
        self._packages = Path(os.environ.get(pod_env.PACKAGES) or packages)
        self._marker = Path(os.environ.get(pod_env.SETUP_DONE) or packages.parent / "setup" / "done")

    def run(self) -> None:
        """Prepare this pod, unless an earlier launcher has prepared it. Raises PreparationError."""
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

    def _install(self, requirements: list[str]) -> None:
        begin = time.monotonic()
        self._log(f"installing packages: {' '.join(requirements)}")
        python = self._environment()
        words = [python, "-m", "pip", "install", "--no-input", "--disable-pip-version-check", "--progress-bar", "off"]
        code, lines = self._call([*words, *requirements], "pip")
        if code:
            errors = [line for line in lines if line.startswith(("ERROR: ", "error: "))]
            said = (errors or lines or ["it says nothing"])[-1]
            raise PreparationError(f"pip cannot install the packages: {said}", lines)
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
        given = os.environ.get("PYTHONPATH", "")
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (given, *added)))
        os.environ["PATH"] = os.pathsep.join(filter(None, (f"{self._packages}/bin", os.environ.get("PATH", ""))))

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
        """Run a command, whose output goes to stderr. Returns its exit code and its last lines.

        It writes into a file, pip.log or setup.log: what it leaves in the background could not go on with a pipe that
        nobody reads.
        """
        parent = os.getpid()
        lines: deque[str] = deque(maxlen=_SHOWN)
        file = self._marker.parent.parent / f"{name}.log"
        file.touch(0o600)
        with (
            file.open("wb") as written,
            file.open(errors="replace") as output,
            subprocess.Popen(
                words,
                cwd=self._settings.work,
                env={"PIP_RETRIES": _RETRIES, **os.environ, **_OF_IMAGE, "PYTHONUNBUFFERED": "1"},
                stdin=subprocess.DEVNULL,
                stdout=written,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=lambda: host.die_with_parent(parent),
            ) as process,
        ):
            self._wakeup.group = process.pid
            rest = ""
            while True:
                ended = process.poll() is not None
                *whole, rest = (rest + output.read()).split("\n")
                for line in filter(str.strip, [*whole, rest] if ended else whole):
                    lines.append(hidden(line, self._settings.secrets))
                    self._log(f"{name}: {line}")
                if ended:
                    return process.returncode, list(lines)  # what it has started in the background stays
                if time.monotonic() >= self._deadline:
                    host.kill_group(process.pid)
                    raise PreparationError("it passed while the pod was prepared", lines, Kind.DEADLINE)
                time.sleep(_POLL)

    def _log(self, text: str) -> None:
        prefix = log_format.LAUNCHER_PREFIX.format(index=self._settings.pod_in_job)
        text = hidden(text, self._settings.secrets)
        host.write_all(2, f"{prefix}{text}\n".encode(errors="replace"))


@contextlib.contextmanager
def _once(marker: Path) -> Iterator[bool]:
    """Whether ``marker`` is not there yet; it is made at the end. Other launchers of this machine wait meanwhile."""
    marker.parent.parent.mkdir(parents=True, exist_ok=True)
    with open(f"{marker.parent}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        marker.parent.mkdir(exist_ok=True)
        yield not marker.exists()
        marker.touch()
