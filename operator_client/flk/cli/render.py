"""`flk render`: print the manifests that `flk submit` would create."""

from __future__ import annotations

from typing import Annotated

import typer

from flk.cli.options import LoadedJob, Namespace, note, output_format, takes_job


@takes_job
def render(
    loaded: LoadedJob,
    namespace: Namespace = None,
    output: Annotated[str, output_format("yaml", "json")] = "yaml",
    no_runtime: Annotated[
        bool, typer.Option("--no-runtime", help="Leave out flk's runtime, which the chart brings: for job.manifest.")
    ] = False,
) -> None:
    """Print the manifests that `flk submit` would create, as YAML on stdout.

    This command does not use a cluster, so the defaults of a namespace are not applied. A job without a name gets a
    generated one, as with `flk submit`.
    """
    from flk import manifest
    from flk_runtime.contract import pod_layout

    job = loaded.job.named()
    bundle = manifest.make_bundle(job, loaded.root)
    for sentence in bundle.left_out:
        note(f"not shipped: {sentence}")
    if bundle.unread:
        note(bundle.unread)
    manifests = manifest.render(job, bundle, namespace=namespace)
    if no_runtime:
        manifests = [m for m in manifests if pod_layout.RUNTIME_ARCHIVE not in (m.get("binaryData") or {})]
    print(manifest.to_json(manifests) if output == "json" else manifest.to_yaml(manifests, job), end="")
