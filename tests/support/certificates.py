"""Certificates that sign themselves."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import NamedTuple


class Certificate(NamedTuple):
    """The files of a certificate and of its key, in the PEM format."""

    path: Path
    key: Path


def make_certificate(folder: Path, name: str, *, alternative: str = "") -> Certificate:
    """Make a certificate for the common name ``name`` in a folder. ``alternative`` is its subjectAltName."""
    made = Certificate(folder / "tls.crt", folder / "tls.key")
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", f"/CN={name}"]
    if alternative:
        command += ["-addext", f"subjectAltName={alternative}"]
    subprocess.run([*command, "-keyout", made.key, "-out", made.path], check=True, capture_output=True)
    return made
