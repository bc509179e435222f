"""The hub of strategy diloco as a child process of the launcher of the job's first pod, over all attempts."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping

from flk_runtime import contract
from flk_runtime.launcher.settings import Settings

_FAREWELL = 90.0  # seconds in which a job that has succeeded waits for the hub, which waits for the last workers
_RESTART_DELAY = 1.0  # seconds


class HubProcess:
    """`python -m flk_runtime.diloco`. It is started again when it dies: the workers connect anew and lose nothing."""

    def __init__(self, settings: Settings, environ: Mapping[str, str], log: Callable[[str], None]) -> None:
        """Start it. It listens on this machine only if its address is there and no secret was given for other jobs."""
        local = environ.get(contract.MEET, "").startswith("127.") and not environ.get(contract.MEET_SECRET)
        host = "127.0.0.1" if local else ""
        self._command = [sys.executable, "-u", "-m", "flk_runtime.diloco", "--listen", f"{host}:{settings.hub_port}"]
        self._command += ["--until-eof"]
        folder = environ.get(contract.MEET_CERTIFICATE, "")
        if folder:
            self._command += ["--certificate", f"{folder}/tls.crt", "--key", f"{folder}/tls.key"]
        self._environ = {**environ, contract.MEET_SECRET: settings.meet_secret, contract.PARENT: str(os.getpid())}
        self._log = log
        self._closing = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None
        self._thread = threading.Thread(target=self._keep_running, daemon=True)
        self._thread.start()

    @property
    def pids(self) -> list[int]:
        """Its process id, if it runs."""
        return [self._process.pid] if self._process else []

    def close(self, code: int) -> None:
        """Wait until the other workers have finished if this launcher ends with code 0, else end the hub at once."""
        self._closing.set()
        process = self._process
        if process and process.stdin:
            process.stdin.close()  # tells it that this pod needs it no longer
            if code != contract.ExitCode.DONE:
                process.terminate()
            self._thread.join(_FAREWELL)
            process.kill()

    def _keep_running(self) -> None:
        while not self._closing.is_set():
            pipe = subprocess.PIPE
            self._process = subprocess.Popen(self._command, stdin=pipe, stderr=pipe, env=self._environ)
            for line in self._process.stderr or ():
                self._log(line.decode(errors="replace").rstrip())
            self._process.wait()
            if self._process.returncode == contract.ExitCode.USAGE:
                return  # it has said why
            if not self._closing.wait(_RESTART_DELAY):
                self._log("the hub of the workers has ended; starting it again")
