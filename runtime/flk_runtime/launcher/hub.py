"""The hub of strategy diloco as a child process of the launcher of the job's first pod, over all attempts."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping

from flk_runtime.contract import pod_env
from flk_runtime.contract.exit_codes import ExitCode
from flk_runtime.launcher.settings import Settings
from flk_runtime.launcher.signals import STOP_SIGNALS

_FAREWELL = 90.0  # seconds in which a job that has succeeded waits for the hub, which waits for the last workers
_RESTART_DELAY = 1.0  # seconds


class HubProcess:
    """The process `python -m flk_diloco`. If it dies, it is started again, and the workers connect anew."""

    def __init__(self, settings: Settings, environ: Mapping[str, str], log: Callable[[str], None]) -> None:
        """Start the hub. It listens on loopback only if its address is there and other jobs have no secret for it."""
        self._others = bool(environ.get(pod_env.HUB_SECRET))  # workers may know of it that it has not met
        host = "127.0.0.1" if environ.get(pod_env.HUB, "").startswith("127.") and not self._others else ""
        self._command = [sys.executable, "-u", "-m", "flk_diloco", "--listen", f"{host}:{settings.hub_port}"]
        self._command += ["--until-eof"]
        folder = environ.get(pod_env.HUB_CERTIFICATE, "")
        if folder:
            self._command += ["--certificate", f"{folder}/tls.crt", "--key", f"{folder}/tls.key"]
        self._environ = {**environ, pod_env.HUB_SECRET: settings.hub_secret, pod_env.PARENT: str(os.getpid())}
        self._log = log
        self._closing = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None
        self._starting = threading.Lock()  # while the hub runs and its process id is not known
        self._thread = threading.Thread(target=self._keep_running, daemon=True)
        self._thread.start()

    def pids(self) -> list[int]:
        """The process id of the hub, if it runs. Waits while it starts: its process exists before its id is known."""
        with self._starting:
            process = self._process
        return [process.pid] if process else []

    def close(self, code: int) -> None:
        """Wait until the other workers have finished if this launcher ends with code 0, else end the hub at once.

        A signal that stops the launcher ends the hub meanwhile. Call it in the main thread, when nothing else is left.
        """
        self._closing.set()
        process = self._process
        if process and process.stdin:
            for number in STOP_SIGNALS:  # the launcher's loop, which handled them, is over
                signal.signal(number, lambda *_: process.terminate())
            process.stdin.close()  # tells it that this pod needs it no longer
            if code != ExitCode.DONE:
                process.terminate()
            self._thread.join(_FAREWELL)
            process.kill()

    def _keep_running(self) -> None:
        while not self._closing.is_set():
            pipe, command = subprocess.PIPE, [*self._command, *(["--others"] if self._others else [])]
            try:
                with self._starting:
                    process = self._process = subprocess.Popen(command, stdin=pipe, stderr=pipe, env=self._environ)
            except OSError as error:  # as at a limit of processes
                self._log(f"cannot start the hub of the workers: {error.strerror or error}; trying again")
                self._closing.wait(_RESTART_DELAY)
                continue
            with process:  # until it has ended
                for line in process.stderr or ():
                    self._log(line.decode(errors="replace").rstrip())
            self._process = None  # another process may get its id
            if process.returncode == ExitCode.USAGE:
                return  # it has said why
            if not self._closing.wait(_RESTART_DELAY):
                self._log("the hub of the workers has ended; starting it again")
                self._others = True
