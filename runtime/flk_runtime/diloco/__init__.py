"""DiLoCo: an outer optimizer over workers that train by themselves between rounds, for slow or unreliable links.

`worker.OuterLoop` is a worker's side: it sends outer gradients of the model that an inner strategy trains and applies
their averages. `server.Hub` connects the workers: a program (`python -m flk_runtime.diloco`) that averages their outer
gradients and lets workers join and leave; nothing else imports it. `DiLoCo` holds the options, and `Membership` says
which worker this is, by the environment. The package imports parallel, distributed and below; only `flk_runtime.run`
imports it.
"""

from flk_runtime.diloco.options import DiLoCo, Membership, choose_options

__all__ = ["DiLoCo", "Membership", "choose_options"]
