"""`flk exec` and `flk port-forward` in a real cluster."""

from __future__ import annotations

import urllib.request
from pathlib import Path
from typing import Any

from tests.support.terminal import on_a_terminal

SERVER = """
import functools, http.server, os
http.server.ThreadingHTTPServer(("0.0.0.0", 8000), http.server.SimpleHTTPRequestHandler).serve_forever()
"""


def test_commands_and_ports(flk: Any, image: str, tmp_path: Path, eventually: Any) -> None:
    (tmp_path / "train.py").write_text(SERVER)
    args = ["submit", "train.py", "--name", "web", "--replicas", "2", "--image", image, "--cpu", "50m"]
    assert flk(*args, cwd=tmp_path).code == 0
    eventually("both pods run", lambda: "2/2" in flk("list").stdout)

    for rank in ("0", "1"):
        said = flk("exec", "web", "--rank", rank, "--", "sh", "-c", "hostname; echo wrong >&2; exit 7")
        assert (said.code, said.stdout, said.stderr) == (7, f"web-worker-{rank}\n", "wrong\n")
    missing = flk("exec", "web", "--", "no-such-command")
    assert missing.code != 0
    assert "no-such-command" in missing.stderr
    beyond = flk("exec", "web", "--rank", "2", "--", "true")
    assert (beyond.code, beyond.stderr) == (2, "error: --rank: job web has no rank 2\n")
    large = flk("exec", "web", "--", "python3", "-c", "print('x' * 3_000_000)")
    assert len(large.stdout) == 3_000_001

    typed = {"$ ": "sleep 1; stty size; tty; exit 3\r"}  # the size follows the start
    shell = [*flk.program, "exec", "web"]
    code, shown = on_a_terminal(shell, tmp_path, environment=flk.env, typed=typed, size=(33, 77))
    assert code == 3, shown
    assert "33 77" in shown
    assert "/dev/pts/" in shown

    forward = flk.start("port-forward", "web", "0:8000", "--rank", "1")
    port = int(forward.stderr.readline().split("127.0.0.1:")[1].split()[0])
    eventually("the page is there", lambda: b"listing" in fetched(port))
    forward.send_signal(2)
    assert forward.wait(timeout=30) == 130


def fetched(port: int) -> bytes:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=10) as page:
            return bytes(page.read())
    except OSError:
        return b""
