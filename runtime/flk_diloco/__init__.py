"""DiLoCo: an outer optimizer over workers that train by themselves between rounds, for slow or unreliable links.

`worker.OuterLoop` is a worker's side: it sends outer gradients of the model that an inner strategy trains and applies
their averages. `server.Hub` connects the workers: a program beside the first pod's ranks that averages their outer
gradients and lets workers join and leave; nothing else imports it. `DiLoCo` holds the options, and `Membership` says
which worker this is, by the environment. `strategy` is what a run calls (`flk_runtime.training.extensions`). The
package imports parallel, distributed and below of the core.
"""

from flk_diloco.options import DiLoCo, Membership

__all__ = ["DiLoCo", "Membership"]
