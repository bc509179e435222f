"""`flk exec`, `flk cp` and `flk port-forward` in a real cluster."""

from __future__ import annotations

import hashlib
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from tests.support.commands import WITHOUT_TORCH
from tests.support.terminal import on_a_terminal

SERVER = """
import http.server, threading
print("serving", flush=True)
servers = [http.server.ThreadingHTTPServer(("0.0.0.0", n), http.server.SimpleHTTPRequestHandler) for n in (8000, 8001)]
threading.Thread(target=servers[0].serve_forever).start()
servers[1].serve_forever()
"""
SIDECAR = """
spec:
  containers:
  - name: sidecar
    image: {image}
    command: [python3, -u, -c, "print('beside'); import time; time.sleep(3600)"]
    resources: {{requests: {{cpu: 10m}}}}
    securityContext: {{allowPrivilegeEscalation: false, capabilities: {{drop: [ALL]}}}}
"""


@pytest.mark.promise("Clusters: flk exec, cp and port-forward reach the pod of a rank")
def test_commands_and_ports(flk: Any, image: str, tmp_path: Path, eventually: Any) -> None:
    (tmp_path / "train.py").write_text(SERVER)
    (tmp_path / "patch.yaml").write_text(SIDECAR.format(image=image))
    args = ["submit", "train.py", "--name", "web", "--replicas", "2", "--image", image, "--cpu", "50m"]
    args += WITHOUT_TORCH
    made = flk(*args, "--patch", "patch.yaml", "--label", "team=web", cwd=tmp_path)
    assert made.code == 0, made.stderr
    eventually("both pods run", lambda: "2/2" in flk("list").stdout)

    for rank in ("0", "1"):
        said = flk("exec", "web", "--rank", rank, "--", "sh", "-c", "hostname; echo wrong >&2; exit 7")
        assert (said.code, said.stdout, said.stderr) == (7, f"web-worker-{rank}\n", "wrong\n")
    missing = flk("exec", "web", "--", "no-such-command")
    assert missing.code != 0
    assert "no-such-command" in missing.stderr

    # The size follows the start.
    typed = {"$ ": "until stty size | grep -v '^0 '; do sleep 0.1; done; tty; exit 3\r"}
    shell = [*flk.program, "exec", "web"]
    code, shown = on_a_terminal(shell, tmp_path, environment=flk.env, typed=typed, size=(33, 77))
    assert code == 3, shown
    assert "33 77" in shown
    assert "/dev/pts/" in shown

    assert flk("exec", "web", "--pod", "1", "-c", "sidecar", "--", "hostname").stdout == "web-worker-1\n"
    assert flk("logs", "web", "--no-follow", "-c", "sidecar", "--rank", "1").stdout == "[pod 1] beside\n"

    forward = flk.start("port-forward", "web", "0:8000", "0:8001", "--rank", "1")
    ports = [int(forward.stderr.readline().split("127.0.0.1:")[1].split()[0]) for _ in range(2)]
    eventually("both pages are there", lambda: all(b"listing" in fetched(port) for port in ports))
    copies_a_folder(flk, tmp_path)
    forward.send_signal(2)
    assert forward.wait(timeout=30) == 130


def copies_a_folder(flk: Any, folder: Path) -> None:
    """From the pod of rank 1."""
    made = "mkdir -p /tmp/run/step-1; head -c 5000000 /dev/urandom | tee /tmp/run/step-1/shard.bin | sha256sum"
    hashed = flk("exec", "web", "--rank", "1", "--", "sh", "-c", made).stdout.split()[0]
    got = flk("cp", "web:/tmp/run/", "back", "--rank", "1", cwd=folder)
    assert got.code == 0, got.stderr
    assert hashlib.sha256((folder / "back" / "step-1" / "shard.bin").read_bytes()).hexdigest() == hashed


def fetched(port: int) -> bytes:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=10) as page:
            return bytes(page.read())
    except OSError:
        return b""
