"""A training: `flk_runtime.init` makes a `Run`, `adopt` a `Loop`; `save` and `restore` serve scripts without either.

The words of this package:

- A *training* is a run, a loop, or what `flk.save` is given. A process has one at a time, which `process` knows.
- A *run* parallelizes models and makes loaders. A *loop* only keeps the state of a script's own loop.
- A *place* is where checkpoints go: a folder, an address, or the memory of the pods.
- A *step* is one of the optimizer. It is *recorded* by `Run.step`, and *ends* where the next batch is drawn: then it is
  saved if that is due.
- An *attempt* is one start of all ranks. A *worker* is a group of ranks that trains with a strategy of its own.

`options` holds the options, `group` opens the process group, `run` and `loop` are the façades that scripts use, over
`models`, `batches`, `steps` and `saves`. Each module is imported where it is needed, since a script that only saves
needs few.
"""
