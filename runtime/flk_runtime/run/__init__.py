"""A training run: `flk_runtime.init` makes a `Run`, and `flk_runtime.save` and `restore` serve scripts without one.

`options` holds the options of a run, `group` opens its process group, `run` is the façade that scripts use, over
`models`, `batches`, `steps`, `saves` and `metrics`; `current` is the run of this process. Each module is imported where
it is needed, since a script that only saves needs few.
"""
