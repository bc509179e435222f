"""`flk render`: the manifests that submit would create."""

from __future__ import annotations

from typing import Annotated

import typer

from flk.cli.options import LoadedJob, Namespace, note, takes_job
from flk.errors import UsageError


@takes_job
def render(
    loaded: LoadedJob,
    namespace: Namespace = None,
    output: Annotated[str, typer.Option("--output", "-o", metavar="FORMAT", help="yaml or json.")] = "yaml",
) -> None:
    """Print the manifests that `flk submit` would create, as YAML on stdout.

    Nothing is asked of a cluster. A job without a name gets the script's with five random characters, as in submit.
    """
    from flk.manifest import bundle as ship
    from flk.manifest import render as rendering
    from flk.manifest import text as manifest

    if output not in ("yaml", "json"):
        raise UsageError(f"--output: must be yaml or json (is {output!r})")
    job = loaded.job.named()
    shipment = ship.collect(job, loaded.root)
    for sentence in shipment.left_out:
        note(f"not shipped: {sentence}")
    manifests = rendering.render(job, shipment, namespace=namespace)
    print(manifest.to_json(manifests) if output == "json" else manifest.to_yaml(manifests, job), end="")
