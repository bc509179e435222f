"""Export of a checkpoint's model to one safetensors file."""

from __future__ import annotations

import argparse
import contextlib
import os
import secrets
import sys
from collections.abc import Sequence
from pathlib import Path

from flk_runtime.checkpoint.files import safetensors
from flk_runtime.checkpoint.files.weights import Weights, file_error
from flk_runtime.contract.failure import ExitCode
from flk_runtime.distributed import process_group
from flk_runtime.errors import CheckpointError


def export_weights(checkpoint: str, file: str | os.PathLike[str]) -> int:
    """Write the model in a checkpoint to one safetensors file on rank 0; return the number of tensors. Collective.

    ``checkpoint`` is a path or address as `Weights` takes it. One tensor is in memory at a time. Raises CheckpointError
    if the checkpoint cannot be read or is damaged, or the file cannot be written.
    """
    weights = Weights(checkpoint)
    return process_group.on_main(lambda: _write(weights, file))


def _write(weights: Weights, file: str | os.PathLike[str]) -> int:
    shapes = {name: weights.kind(name) for name in sorted(weights.names())}
    temporary = Path(f"{os.fspath(file)}.{secrets.token_hex(4)}.tmp")  # pods may have processes of the same number
    try:
        tensors = ((name, weights.tensor(name)) for name in shapes)
        safetensors.write(temporary, shapes, tensors, {"format": "pt", "source": weights.place})
        temporary.replace(file)
    except OSError as error:
        raise file_error(f"cannot write {os.fspath(file)}: {error.strerror or error}", error) from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
    return len(shapes)


def main(arguments: Sequence[str]) -> int:
    """Run ``export CHECKPOINT FILE``; returns an `ExitCode`."""
    parser = argparse.ArgumentParser(prog="python -m flk_runtime")
    commands = parser.add_subparsers(dest="command", required=True)
    export = commands.add_parser("export", help="write the model in a checkpoint to one safetensors file")
    export.add_argument("checkpoint", help="folder of a checkpoint or of all, or s3://BUCKET/PREFIX")
    export.add_argument("file", help="safetensors file to write")
    options = parser.parse_args(arguments)
    try:
        count = export_weights(options.checkpoint, options.file)
    except CheckpointError as error:
        print(f"flk: {error}", file=sys.stderr)
        return int(error.kind.meaning.code)
    print(f"{count} tensors in {options.file}")
    return int(ExitCode.DONE)
