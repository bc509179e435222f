"""A service of an extension: a program beside the ranks of the job's first pod, over all attempts.

The launcher starts it by the name of its module (FLK_SERVICE) and knows nothing else of it. The program has the
variables of the pod, and where FLK_SERVICE_KEY is set, one key with all ranks of the job. It may end when its standard
input does: then the pod needs it no longer.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping

from flk_runtime.contract import ExitCode, pod_env
from flk_runtime.launcher.control import STOP_SIGNALS
from flk_runtime.launcher.settings import Settings

_FAREWELL = 90.0  # seconds in which a job that has succeeded waits for its service, which others may still use
_RESTART_DELAY = 1.0  # seconds
AGAIN = "--again"  # an argument of the program if it has run before


class Service:
    """The process of a service. If it dies, it is started again."""

    def __init__(self, settings: Settings, environ: Mapping[str, str], log: Callable[[str], None]) -> None:
        self._name = settings.service
        self._environ = {**environ, **settings.service_key_variable, pod_env.PARENT: str(os.getpid())}
        self._log = log
        self._closing = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None
        self._starting = threading.Lock()  # while the process runs and its id is not known
        self._thread = threading.Thread(target=self._keep_running, daemon=True)

    def start(self) -> None:
        """Start the program."""
        self._thread.start()

    def pids(self) -> list[int]:
        """The process id, if it runs. Waits while it starts: the process exists before its id is known."""
        with self._starting:
            process = self._process
        return [process.pid] if process else []

    def close(self, code: int) -> None:
        """Wait until the service ends by itself if this launcher ends with code 0, else end it at once.

        A signal that stops the launcher ends it meanwhile. Call it in the main thread, when nothing else is left.
        """
        self._closing.set()
        process = self._process
        if process and process.stdin:
            for number in STOP_SIGNALS:  # the launcher's loop, which handled them, is over
                signal.signal(number, lambda *_: process.terminate())
            process.stdin.close()
            if code != ExitCode.DONE:
                process.terminate()
            self._thread.join(_FAREWELL)
            process.kill()

    def _keep_running(self) -> None:
        command, pipe = [sys.executable, "-u", "-m", self._name], subprocess.PIPE
        while not self._closing.is_set():
            try:
                with self._starting:
                    process = self._process = subprocess.Popen(command, stdin=pipe, stderr=pipe, env=self._environ)
            except OSError as error:  # as at a limit of processes
                self._log(f"cannot start the service {self._name}: {error.strerror or error}; trying again")
                self._closing.wait(_RESTART_DELAY)
                continue
            with process:  # until it has ended
                for line in process.stderr or ():
                    self._log(line.decode(errors="replace").rstrip())
            self._process = None  # another process may get its id
            if process.returncode == ExitCode.USAGE:
                return  # it has said why
            if not self._closing.wait(_RESTART_DELAY):
                self._log(f"the service {self._name} has ended; starting it again")
                command = [*command[:4], AGAIN]
