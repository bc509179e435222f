"""The program that `flk profile` runs beside a rank: it asks the rank for a profile.

It prints one object of JSON: what `flk_runtime.profiling.rank` answers, or ``error`` and ``detail``. The errors are
those of the rank, and ``absent`` (no such rank runs here), ``silent`` (it does not answer) and ``ended``.
"""

from __future__ import annotations

import contextlib
import glob
import json
import os
import socket
import sys
import tempfile
from typing import Any, Final, cast

_ANSWER_TIMEOUT: Final = 10.0  # seconds in which the rank says that it has the request


def main(text: str) -> None:
    """Print the answer to a request.

    ``text`` is a request as JSON: ``folders`` (where launchers keep their files, as a pattern), ``local_rank``,
    ``arguments`` for the rank, and ``source``, the program that the rank executes.
    """
    request = json.loads(text)
    connection = _connected(request)
    if connection is None:
        answer = {"error": "absent"}
    else:
        with connection:
            answer = _profile(connection, request)
    print(json.dumps(answer))


def _connected(request: dict[str, Any]) -> socket.socket | None:
    """A connection to the observer of the rank in the newest attempt, with its folder as the working folder.

    The launcher may remove the folders of former attempts meanwhile.
    """
    root = tempfile.gettempdir()
    found = glob.glob(f"{request['folders']}/attempt_*/{request['local_rank']}/observer.socket", root_dir=root)
    for path in sorted(found, key=lambda each: int(each.split("/")[-3].rpartition("_")[2]), reverse=True):
        connection = socket.socket(socket.AF_UNIX)
        with contextlib.suppress(OSError):
            os.chdir(os.path.join(root, os.path.dirname(path)))  # the path of a Unix socket has at most 107 bytes
            connection.settimeout(_ANSWER_TIMEOUT)
            connection.connect(os.path.basename(path))
            return connection
        connection.close()
    return None


def _profile(connection: socket.socket, request: dict[str, Any]) -> dict[str, Any]:
    """Send the program to the rank and wait for its answer: a line at once, and one at the end."""
    sent = {"source": request["source"], "arguments": {**request["arguments"], "folder": os.getcwd()}}
    try:
        with connection.makefile("rb") as file:
            connection.sendall(json.dumps(sent).encode() + b"\n")
            file.readline()  # the rank has the request
            connection.settimeout(None)  # the rank has its own limits
            last = file.readline()
    except TimeoutError:
        return {"error": "silent"}
    except (OSError, ValueError):
        return {"error": "ended"}
    return cast("dict[str, Any]", json.loads(last)) if last else {"error": "ended"}


if __name__ == "__main__":
    main(sys.argv[1])
