"""`flk init`: write a commented job file."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Annotated

import typer

from flk.cli.options import note
from flk.errors import UsageError


def init(
    script: Annotated[str, typer.Argument(metavar="[SCRIPT]", help="The training script.", show_default=False)] = "",
    replicas: Annotated[int, typer.Option("--replicas", min=1, help="Number of pods.")] = 1,
    schema: Annotated[
        bool,
        typer.Option("--schema", help="Also write flk.schema.json, which editors use to check the file."),
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Overwrite files that exist.")] = False,
) -> None:
    """Write flk.yaml with a comment for every field."""
    from flk.spec import schema as schemas
    from flk.spec.job import validated
    from flk.spec.overlay import JOB_FILE

    script = script or next((name for name in ("train.py", "main.py") if Path(name).is_file()), "train.py")
    validated({"command": [script]}, where={"command": "SCRIPT"})
    texts = {JOB_FILE: schemas.template(script, replicas, with_schema=schema)}
    if schema:
        texts[schemas.SCHEMA_FILE] = json.dumps(schemas.schema(), indent=2) + "\n"
    existing = [name for name in texts if Path(name).exists()]
    if JOB_FILE in existing and not force:  # the schema is generated, and replaced
        raise UsageError(f"{JOB_FILE} exists already", hint="--force overwrites it")
    for name, text in texts.items():
        try:
            Path(name).write_text(text, encoding="utf-8")
        except OSError as error:
            if name not in existing and not Path(name).is_symlink():  # on a full disk it is there, and empty
                with contextlib.suppress(OSError):
                    Path(name).unlink(missing_ok=True)
            raise UsageError(f"cannot write {name}: {(error.strerror or str(error)).lower()}") from None
        note(f"wrote {name}")
    if not Path(script).exists():
        note(f"flk.yaml names {script}, which does not exist yet")
