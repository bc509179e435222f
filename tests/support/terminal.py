"""Programs on a pseudo-terminal."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import termios
import time
from collections.abc import Mapping, Sequence
from pathlib import Path


def on_a_terminal(
    command: Sequence[str],
    folder: Path,
    *,
    environment: Mapping[str, str] | None = None,
    typed: Mapping[str | re.Pattern[str], str] = {},
    size: tuple[int, int] = (40, 120),
    timeout: float = 120,
) -> tuple[int, str]:
    """Run a command with a terminal of ``size`` (rows, columns); give its exit code and all that it wrote.

    ``typed`` maps what the terminal must have shown, a text or a pattern, to what is typed then, in this order.
    """
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", *size, 0, 0))
    process = subprocess.Popen(
        command,
        cwd=folder,
        env=None if environment is None else dict(environment),
        stdin=slave,
        stdout=slave,
        stderr=slave,
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # so that what is typed may be a signal
    )
    os.close(slave)
    written, waiting, until = b"", list(typed.items()), time.monotonic() + timeout
    try:
        while time.monotonic() < until:
            if waiting and _shows(written.decode(errors="replace"), waiting[0][0]):
                os.write(master, waiting.pop(0)[1].encode())
            if select.select([master], [], [], 0.2)[0]:
                try:
                    written += os.read(master, 1 << 16)
                except OSError:  # Linux gives EIO at the end
                    break
        return process.wait(timeout=10), written.decode(errors="replace")
    finally:
        process.kill()
        process.wait()
        os.close(master)


def _shows(written: str, what: str | re.Pattern[str]) -> bool:
    return what in written if isinstance(what, str) else bool(what.search(written))
