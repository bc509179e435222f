"""A training run: `flk_runtime.init` makes a `Run`, and `flk_runtime.save` and `restore` serve scripts without one.

`options` is what a run is started with, `group` opens its process group, `run` is the façade that scripts use, over
`models`, `batches`, `steps`, `saves` and `metrics`; `current` is the run of this process. Modules are imported by those
who need them, since a script that only saves needs few.
"""
