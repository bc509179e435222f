"""Channel: the connection between rank 0 and the process with the whole model, a socket in a folder of theirs."""

from __future__ import annotations

import io
import os
import time
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any, Final

import torch

from flk_runtime.errors import SetupError

KEY: Final = "FLK_VERIFY_KEY"
"""The variable with the secret by which both ends know each other."""
_POLL: Final = 0.05  # seconds


class Channel:
    """Sends and receives dictionaries of tensors and plain values."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    @classmethod
    def listen(cls, folder: str) -> Channel:
        """Wait for the other end."""
        with Listener(str(Path(folder, "socket")), "AF_UNIX", authkey=_key()) as listener:
            return cls(listener.accept())

    @classmethod
    def connect(cls, folder: str, limit: float) -> Channel:
        """Connect to the other end, which may not listen yet. Raises SetupError after ``limit`` seconds."""
        deadline = time.monotonic() + limit
        while True:
            try:
                return cls(Client(str(Path(folder, "socket")), "AF_UNIX", authkey=_key()))
            except (FileNotFoundError, ConnectionRefusedError):
                if time.monotonic() > deadline:
                    raise SetupError("the whole model in one process has not begun") from None
                time.sleep(_POLL)

    def send(self, message: dict[str, Any]) -> None:
        """Send ``message``. It is lost if the other end has left."""
        file = io.BytesIO()
        torch.save(message, file)
        try:
            self._connection.send_bytes(file.getbuffer())
        except OSError:
            return

    def receive(self) -> dict[str, Any]:
        """The next message; empty if the other end has left without one."""
        try:
            data = self._connection.recv_bytes()
        except (EOFError, OSError):
            return {}
        message: dict[str, Any] = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        return message


def _key() -> bytes:
    return os.environ[KEY].encode()
