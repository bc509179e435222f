"""init(): discover this process's rank, run the preflight check, open the process group and make the Run."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import torch

from flk_runtime.distributed import process_group
from flk_runtime.errors import SetupError
from flk_runtime.system import rng
from flk_runtime.training import extensions
from flk_runtime.training.entry.group import entered
from flk_runtime.training.options import LOG_EVERY, TIMEOUT, RunOptions
from flk_runtime.training.process import current
from flk_runtime.training.run import Run


def init(
    *,
    strategy: Any = None,
    seed: int | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
    save_every: int | None = None,
    store_every: int | None = None,
    keep: int | None = None,
    log_every: int = LOG_EVERY,
    metrics: str | None = None,
    device: str | torch.device | None = None,
    timeout: float = TIMEOUT,
) -> Run:
    """Open the process group and return this process's `Run`. Collective.

    Works under every launcher that `flk_runtime.discovery` knows, and without one as a world of one rank. A second call
    returns the same run, if its arguments are the same or left out. After `Run.close` it begins another training, as
    for the next fold or seed, from its own start: its checkpoints are in the folder ``training-1`` below the place of
    the first one, then ``training-2``, so that a restarted process finds each again if it begins its trainings in the
    same order. One that leaves out what it has finished passes each a ``checkpoint=`` of its own.

    - ``strategy``: how `Run.parallelize` shares a model; default $FLK_STRATEGY, else ddp. auto: rank 0 plans the
      script in another process, or uses results of `flk bench`, and chooses for all ranks. diloco: several workers,
      each with an inner strategy, as $FLK_DILOCO says, or a `flk_diloco.DiLoCo` in place of the name.
    - ``seed``: of Python's, NumPy's and torch's generators, and of the order of loaders; default $FLK_SEED, else the
      script's own: where it has seeded torch with a number from 0 to 2**32 - 1, all three generators stay as rank 0
      has them now. Else torch's seed is 0, since a larger number cannot be told from the random one that torch begins
      with; Python's and NumPy's generators stay as rank 0 has them, which a script that has not seeded them finds
      otherwise in each attempt. All ranks draw alike, also where each has had a seed of its own, so that they build
      the same model and split the data alike, until a batch of a loader is drawn or the model is called first with
      gradients. From then on each rank draws numbers of its own, or goes on with those of the checkpoint. `Run.close`
      seeds the generators anew, so that what follows draws the same in every attempt.
    - ``checkpoint``: folder of checkpoints that all ranks see, or ``s3://BUCKET/PREFIX``; default $FLK_CHECKPOINT, else
      none are written.
    - ``save_every``: steps between two checkpoints; default $FLK_SAVE_EVERY, else 100; 0: only at the end.
    - ``store_every``: steps between two checkpoints in storage, where the memory of the pods keeps those of
      ``save_every``; default $FLK_STORE_EVERY, else every checkpoint is stored; 0: only at the end. It has no effect
      without storage.
    - ``keep``: number of the newest checkpoints that stay; default $FLK_KEEP, else 2.
    - ``log_every``: steps between two lines of metrics; 0: none.
    - ``metrics``: where the lines of metrics go besides the log: ``tensorboard:/PATH``, ``mlflow`` and ``wandb``,
      separated by commas, or ``none``; default $FLK_METRICS, else what MLFLOW_TRACKING_URI and WANDB_PROJECT imply.
    - ``device``: default ``cuda:LOCAL_RANK`` if torch finds CUDA, else cpu.
    - ``timeout``: seconds that a collective may take. $FLK_PREFLIGHT_TIMEOUT and $FLK_PREFLIGHT are for the ranks'
      comparison before the group opens.

    Raises SetupError if an argument or a variable is wrong, and on all ranks if their environments do not match:
    DiscoveryError if the launcher's variables contradict each other, RendezvousError if a rank cannot connect,
    CheckpointError if rank 0 cannot use the checkpoint folder.
    """
    given = dict(locals())
    if isinstance(current.training, Run) and current.is_training:
        open_run, defaults = current.training, init.__kwdefaults__ or {}
        changed = [name for name, value in given.items() if value not in (defaults[name], open_run.given[name])]
        if changed:
            raise SetupError(
                "init was already called with other arguments: call flk.init() without arguments to get the open run, "
                f"or close it first (differs: {', '.join(changed)})"
            )
        return open_run
    if current.is_training:
        raise SetupError(
            "init: flk.adopt keeps the state of this process's loop: use one of both, or close the loop before"
        )
    with entered(given) as (rank_info, options, owns_group):
        chosen = extensions.choose(options.strategy, rank_info, options.device, options.timeout)
        options = dataclasses.replace(options, strategy=chosen)
        extensions.verify(chosen, rank_info, options.timeout)
        options = dataclasses.replace(options, seed=_seed(options))
        current.training = run = Run(rank_info, options, given, owns_group=owns_group)
    return run


def _seed(options: RunOptions) -> int:
    """Seed the generators, or have all ranks draw as the script has seeded rank 0. Returns the seed. Collective.

    Rank 0 says which: variables may differ between ranks that do not compare them.
    """

    def begin() -> tuple[int, dict[str, Any]] | None:
        if options.has_seed:
            return None
        if (seed := rng.script_seed()) is None:
            torch.manual_seed(seed := options.seed)  # the script may have seeded the others, which cannot be told
        return seed, rng.get_state()

    begun = process_group.on_main(begin)
    if begun is None:
        rng.seed_all(options.seed)
        return options.seed
    seed, state = begun
    if process_group.rank():  # rank 0 is as it was
        rng.set_state(state)
    return seed
