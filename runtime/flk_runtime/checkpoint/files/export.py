"""Export of a checkpoint's model to one safetensors file, and import of such a file as a checkpoint."""

from __future__ import annotations

import argparse
import contextlib
import os
import secrets
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from flk_runtime.checkpoint.files import safetensors
from flk_runtime.checkpoint.files.weights import Weights, file_error
from flk_runtime.checkpoint.save import Retention, Saver
from flk_runtime.checkpoint.state import chunks_of
from flk_runtime.checkpoint.storage import open_destination
from flk_runtime.contract import VERSION
from flk_runtime.contract.exit_codes import ExitCode
from flk_runtime.distributed import process_group
from flk_runtime.errors import CheckpointError, MismatchError, storage_access

_TIMEOUT = 60.0  # seconds; a single process waits for no other rank


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


def import_weights(file: str, checkpoint: str) -> int:
    """Write a checkpoint of step 0 that holds the weights in ``file``, from which a run starts; return their number.

    ``checkpoint`` is the folder or address of a run's checkpoints, which holds none yet. Raises CheckpointError.
    """
    weights = Weights(file)
    destination = open_destination(checkpoint)
    destination.prepare()
    with storage_access(f"read the checkpoints in {checkpoint}"):
        steps = destination.steps()
    if steps:
        raise MismatchError(f"{checkpoint} holds checkpoints already: name another folder")
    chunks = [chunk for name in weights.names() for chunk in chunks_of(("model", name), weights.tensor(name))]
    saver = Saver(
        destination,
        None,
        retention=Retention(),
        metadata={"source": file, "flk": VERSION, "torch": torch.__version__},
        timeout=_TIMEOUT,
        on_saved=lambda step: None,
        warn=lambda text: None,
    )
    saver.save(0, chunks, {"steps": 0, "objects": {"model": {}}, "own": {}, "random": None})
    saver.wait()
    return len(chunks)


def main(arguments: Sequence[str]) -> int:
    """Run ``export CHECKPOINT FILE`` or ``import FILE CHECKPOINT``; returns an `ExitCode`."""
    parser = argparse.ArgumentParser(prog="python -m flk_runtime")
    commands = parser.add_subparsers(dest="command", required=True)
    places = "folder of a checkpoint or of all, or s3://BUCKET/PREFIX"
    export = commands.add_parser("export", help="write the model in a checkpoint to one safetensors file")
    export.add_argument("checkpoint", help=places)
    export.add_argument("file", help="safetensors file to write")
    take = commands.add_parser("import", help="make a checkpoint of weights, from which a run starts")
    take.add_argument("file", help="file or folder of weights: safetensors, torch.save, Hugging Face")
    take.add_argument("checkpoint", help="new folder of checkpoints, or s3://BUCKET/PREFIX")
    options = parser.parse_args(arguments)
    try:
        if options.command == "export":
            count, target = export_weights(options.checkpoint, options.file), options.file
        else:
            count, target = import_weights(options.file, options.checkpoint), options.checkpoint
    except CheckpointError as error:
        print(f"flk: {error}", file=sys.stderr)
        return int(error.kind.meaning.code)
    print(f"{count} tensors in {target}")
    return int(ExitCode.DONE)
