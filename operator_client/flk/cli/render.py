"""`flk render`: print the manifests that `flk submit` would create."""

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

    This command does not use a cluster, so the defaults of a namespace are not applied. A job without a name gets a
    generated one, as with `flk submit`.
    """
    from flk import manifest

    if output not in ("yaml", "json"):
        raise UsageError(f"--output: must be yaml or json (is {output!r})")
    job = loaded.job.named()
    bundle = manifest.make_bundle(job, loaded.root)
    for sentence in bundle.left_out:
        note(f"not shipped: {sentence}")
    manifests = manifest.render(job, bundle, namespace=namespace)
    print(manifest.to_json(manifests) if output == "json" else manifest.to_yaml(manifests, job), end="")
