"""discover(): the RankInfo of this process, and which launcher counts where several have set their variables.

Where several launchers have set variables (mpirun inside a Slurm job, say), they must agree, or one must have been
started inside the other; anything else is an error.
"""

from __future__ import annotations

import os

from flk_runtime.discovery.readers import LAUNCHERS, START_WITH_LAUNCHER
from flk_runtime.discovery.variables import Environ, Launcher, RankInfo, number, show
from flk_runtime.errors import DiscoveryError


def discover(environ: Environ | None = None) -> RankInfo:
    """The RankInfo that ``environ`` (by default this process's) describes; a world of one without any launcher.

    A variable that is empty counts as not set. Raises DiscoveryError where variables contradict each other or are
    missing, or where they show that other ranks were intended and nobody started them.
    """
    environ = {name: value for name, value in (os.environ if environ is None else environ).items() if value != ""}
    present = [launcher for launcher in LAUNCHERS if launcher.is_present(environ)]
    if present:
        innermost, *others = present
        return _resolve(present, environ) if others and not innermost.final else innermost.read(innermost, environ)
    _check_alone(environ)
    return RankInfo()


def _resolve(present: list[Launcher], environ: Environ) -> RankInfo:
    """The RankInfo that counts where several launchers have one; they are given from the innermost to the outermost."""
    infos: dict[Launcher, RankInfo] = {}
    errors = []
    for launcher in present:
        try:
            infos[launcher] = launcher.read(launcher, environ)
        except DiscoveryError as error:
            errors.append(error)
    if not infos:
        raise errors[-1]
    chosen = next(iter(infos))
    for other in present:
        if _is_consistent(other, infos.get(other), environ, infos[chosen]):
            if chosen.name == "env" and other in infos:
                chosen = other  # somebody copied the launcher's numbers to torch's variables
        elif other not in infos or not _may_contain(
            infos[other], infos[chosen], number(environ, chosen.daemons, default=0)
        ):
            raise DiscoveryError(
                f"{show(chosen, environ)} and {show(other, environ)} contradict each other: unset the variables that "
                "are left over from another launcher, or start the script with one launcher only"
            )
    return infos[chosen]


def _is_consistent(other: Launcher, others: RankInfo | None, environ: Environ, info: RankInfo) -> bool:
    """Whether all variables of the launcher ``other`` agree with ``info``.

    ``others`` is the RankInfo that they make, or None where they are too few for one.
    """
    if others:
        names = ("rank", "local_rank", "world_size", "local_world_size")
        return all(getattr(others, name) == getattr(info, name) for name in names)
    if other.name != "env" and other.world_size not in environ:
        raise DiscoveryError(
            f"{show(other, environ)} is set without {other.world_size}, together with variables of another launcher: "
            "unset the variables that are left over"
        )
    expected = ((other.rank, info.rank), (other.local_rank, info.local_rank), (other.world_size, info.world_size))
    return all(number(environ, name) == value for name, value in expected if name in environ)


def _may_contain(outer: RankInfo, inner: RankInfo, daemons: int) -> bool:
    """Whether ``outer``'s launcher may have started ``inner``'s: once per node, with at least one rank on each.

    Nodes may have no rank if ``inner``'s launcher tells the number of its ``daemons``, of which ``outer`` has started
    all but the first. 0: it does not tell.
    """
    return outer.world_size == outer.nodes and (
        inner.world_size - inner.local_world_size >= outer.nodes - 1 or outer.world_size == daemons - 1
    )


def _check_alone(environ: Environ) -> None:
    """Raise DiscoveryError if other ranks were intended, but nobody has started them."""
    nodes = environ.get("PET_NNODES", "1")
    if nodes != "1":
        raise DiscoveryError(
            f"PET_NNODES={nodes}: this pod is one of several, but no launcher started this process, so every pod would "
            f"train alone: {START_WITH_LAUNCHER}"
        )
    for name, noun in (("SLURM_NTASKS", "tasks"), ("SLURM_NNODES", "nodes")):
        if number(environ, name, default=1) > 1:
            raise DiscoveryError(
                f"{name}={environ[name]}: this Slurm job has {environ[name]} {noun}, but srun did not start this "
                "process, so the other ranks would never start: use `srun python script.py`, or set WORLD_SIZE=1 to "
                "train alone"
            )
