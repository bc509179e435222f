"""From a job to the Kubernetes objects that run it: pure functions, except that the bundle reads the user's files.

- `files`, `git` and `secret_names` choose the files that travel; `runtime` packs flk's runtime, and `bundle` both
- `environment` and `pod` make the template of the pods; `render` makes all objects, and writes them as YAML
- `convert` goes the other way, from a PyTorchJob to the fields of a job file, and `command` does so for its command

`flk.jobs`, `flk.local` and `flk.cli` import this package; of flk it imports only what is below `flk.spec`.
"""

from flk.manifest.bundle import Bundle, make_bundle
from flk.manifest.environment import rendezvous_secret
from flk.manifest.pod import patched
from flk.manifest.render import render, to_json, to_yaml
from flk.manifest.runtime import runtime_archive

__all__ = ["Bundle", "make_bundle", "patched", "render", "rendezvous_secret", "runtime_archive", "to_json", "to_yaml"]
