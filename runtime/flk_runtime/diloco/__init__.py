"""DiLoCo: an outer optimizer over workers that train by themselves between rounds, for slow or unreliable links.

`worker.OuterLoop` is a worker's side: it sends outer gradients of the model that an inner strategy trains and applies
their averages. `server.Hub` is where the workers meet: a program (`python -m flk_runtime.diloco`) that averages what
they send and lets them join and leave; nothing else imports it. `DiLoCo` holds the options, `Membership` what the
environment says about this worker. The package imports parallel, distributed and below; only `flk_runtime.run`
imports it. All but the options travels only with jobs whose strategy is diloco.
"""

from flk_runtime.diloco.options import DiLoCo, Membership, choose_options

__all__ = ["DiLoCo", "Membership", "choose_options"]
