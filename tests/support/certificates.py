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
    curve = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"]  # a key for RSA takes a third of a second
    command = ["openssl", "req", "-x509", *curve, "-nodes", "-days", "2", "-subj", f"/CN={name}"]
    if alternative:
        command += ["-addext", f"subjectAltName={alternative}"]
    subprocess.run([*command, "-keyout", made.key, "-out", made.path], check=True, capture_output=True)
    return made
