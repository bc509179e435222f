"""Imports of the fork server before it forks the ranks, and the values of packages that each rank sets again.

An import costs each rank of each attempt its time again unless it is made here. Only what the ranks would import anyway
is worth it. A package that starts threads would make every fork unsafe. What a package takes for its process when it is
imported, such as RANK or a random value, all ranks would share. `OF_PROCESS` lists these values.
"""

from __future__ import annotations

import ast
import contextlib
import gc
import importlib
import os
import re
import runpy
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any, Final

from flk_runtime.contract import pod_env
from flk_runtime.errors import SetupError

TORCH = ("torch", "torch.distributed", "torch.nn.parallel", "torch.utils.data", "numpy")
# The constructor of every torch optimizer imports this, which takes a second.
FOR_OPTIMIZERS = ("torch._dynamo",)
# The sharding strategies import these, which takes half a second.
UNSHARDED = ("", "none", "ddp", "no_shard")  # of an extension's strategy, nothing is known
FOR_SHARDING = ("torch.distributed.fsdp", "torch.distributed.tensor")
# The modules that a script with flk's library has imported by its first step: they take a fifth of a second.
FOR_LIBRARY = (
    "flk_runtime.training.entry.init",
    "flk_runtime.checkpoint.gather",
    "flk_runtime.checkpoint.load",
    "flk_runtime.checkpoint.save",
    "flk_runtime.parallel.ddp",
    "flk_sinks.curves",
    "torch.utils.serialization.config",  # by torch.save
    "encodings.idna",  # by the first name of a host
)
# Packages that change others, and have to be imported before them: only the rank has the right order.
PATCHING = ("unsloth",)
# Packages that scripts of training import, that take long to import, and that are known to leave no threads and to take
# no more for their process than what `OF_PROCESS` sets again. A job may name others.
PACKAGES = (
    "torch",
    "numpy",
    "transformers",
    "datasets",
    "lightning",
    "pytorch_lightning",
    "accelerate",
    "torchvision",
    "timm",
    "torchtitan",
    "flk_hosts",
)
# Folders of Python's library, of installed packages and of flk's runtime, which may be below the work folder.
_INSTALLED = re.compile(r"python3\.\d+|(site|dist)-packages|\.flk")


def _draw_key(module: Any) -> None:
    module.current_process().authkey = os.urandom(32)


def _set_rank(variable: str) -> Callable[[Any], None]:
    return lambda module: setattr(module.rank_zero_only, "rank", int(os.environ.get(variable, "0")))


# By the module that takes a value for its process when it is imported: what sets it again in a fork. Python does so for
# ``random``, ``tempfile`` and ``uuid``, torch for the generators of GPUs when it first uses them, and wandb for itself.
# The seed of Python's hashes cannot be drawn again.
OF_PROCESS: Final[Mapping[str, Callable[[Any], object]]] = {
    "torch": lambda module: module.default_generator.seed(),
    "numpy.random": lambda module: module.seed(),
    "sympy.core.random": lambda module: module.seed(),  # torch._dynamo imports it; it has two generators
    "multiprocessing.process": _draw_key,
    "multiprocess.process": _draw_key,  # datasets imports it
    "lightning_utilities.core.rank_zero": _set_rank("RANK"),  # Lightning reads it into this module
    "torchmetrics.utilities.prints": _set_rank("LOCAL_RANK"),  # Lightning imports it
    # It names the caches of what has no hash. With one name, a rank would read the data of another one or attempt.
    "datasets.fingerprint": lambda module: module.fingerprint_rng.seed(),
    "webdataset.shardlists": lambda module: module.default_rng.seed(),  # draws shards, if it is given no other
}


def become_own() -> None:
    """Set again what imported modules took for their process, which all ranks and attempts share after the fork."""
    for name, renew in OF_PROCESS.items():
        if module := sys.modules.get(name):
            try:
                renew(module)
            except AttributeError:  # another release of the package may keep it elsewhere, or have none
                print(
                    f"flk: what {name} took for its process could not be set again after the fork, so ranks may share "
                    "random values or a rank: `preload: torch` leaves its import to each rank",
                    file=sys.stderr,
                )


def preload(
    script: Path | None,
    work: Path,
    names: Sequence[str] = (),
    strategy: str = "",
    *,
    makes_steps: bool = True,
    module: Path | None = None,
) -> None:
    """Import what the ranks will need: torch, and ``names`` or what ``script`` imports of `PACKAGES` at its top.

    ``work`` is the folder in which the ranks start. If they run a module there is no script, and ``module`` is what
    `module_file` has found.

    The modules that optimizers need are imported if the text of ``script`` contains ``optim`` or there is no script.
    The modules for sharding are imported if the text contains ``shard`` or the job's ``strategy`` shards or may do so.
    The modules of flk's library are imported if the text contains ``flk_runtime`` or ``flk_hosts``. Ranks that make no
    steps of training need torch alone.

    Raises ImportError without torch, and SetupError for one of ``names`` that cannot be imported. Other modules that
    are not installed are skipped: the script may do without them.
    """
    top, folder = script or module, script.resolve().parent if script else work.resolve()
    text = (top.read_bytes() if top else b"") + b"optim" * (makes_steps and not script)
    shards = b"shard" in text or (makes_steps and strategy not in UNSHARDED)
    modules = TORCH + FOR_OPTIMIZERS * (b"optim" in text) + FOR_SHARDING * shards
    modules += FOR_LIBRARY * (b"flk_runtime" in text or b"flk_hosts" in text)
    # Imports make hardly any garbage. Collecting it takes a tenth of the time of torch's import, a quarter of Dynamo's.
    gc.disable()
    try:
        for each in modules:
            try:
                importlib.import_module(each)
            except ImportError:
                if each == "torch":
                    raise
        if names:
            _import_named(names, folder if script else None)
        elif top:
            for name, attributes in leading_imports(top, folder, work):
                try:
                    # As the statement does it: packages such as transformers import a module when a name is taken.
                    __import__(name, fromlist=attributes)
                except (Exception, SystemExit):  # noqa: S112 - the rank that needs it fails with its own traceback
                    continue
    finally:
        gc.enable()


def module_file(name: str, work: Path) -> Path | None:
    """The file of a module of `PACKAGES` that the ranks run, as with ``-m torchtitan.train``.

    None for other ones, and for one in the folder ``work``: the code of its package is the user's, and runs in ranks.
    """
    if name.partition(".")[0] in PACKAGES and not _is_own(name, work, work):
        with contextlib.suppress(Exception, SystemExit):  # each rank fails with it
            return Path(runpy._get_module_details(name)[1].origin)  # type: ignore[attr-defined]
    return None


def leading_imports(top: Path, folder: Path, work: Path) -> Iterator[tuple[str, list[str]]]:
    """Yield what a script or module imports of `PACKAGES` at its top: the names of modules, and those taken from each.

    The ranks look for modules in ``folder`` first, and start in ``work``. The top ends at the first statement that is
    more than an import, because it may set what a later import reads (``os.environ["HF_HOME"] = ...``), and at the
    first import of the user's own module or one of `PATCHING`, which may do the same.
    An own module also hides a package of its name: a script's own ``datasets`` is not the installed one.
    """
    try:
        with warnings.catch_warnings():  # the ranks print them, with the name of the file
            warnings.simplefilter("ignore")
            body = ast.parse(top.read_bytes()).body
    except (SyntaxError, ValueError):  # each rank fails with it
        return
    for node in body:
        match node:
            case ast.Expr(value=ast.Constant()):  # the docstring
                continue
            case ast.Import(names=names):
                statements: list[tuple[str, list[str]]] = [(name.name, []) for name in names]
            case ast.ImportFrom(module=str(module), names=names, level=0):
                statements = [(module, [name.name for name in names])]
            case _:
                return
        for module, attributes in statements:
            if module.partition(".")[0] in PATCHING or _is_own(module, folder, work):
                return
            if module.partition(".")[0] in PACKAGES:
                yield module, attributes


def _import_named(names: Sequence[str], folder: Path | None) -> None:
    """Import the modules that the job names. ``folder`` is the script's, if the ranks run one. Raises SetupError."""
    for name in names:
        if folder and _place(name, folder) == folder:
            raise SetupError(
                f"{pod_env.PRELOAD} names {name}, which is in the script's folder: each rank imports that itself, "
                "since it may read what differs between ranks; name installed packages"
            )
        try:
            importlib.import_module(name)
        except (Exception, SystemExit) as error:
            raise SetupError(
                f"{pod_env.PRELOAD} names {name}, which {sys.executable} cannot import: {type(error).__name__}: {error}"
            ) from error


def _is_own(module: str, folder: Path, work: Path) -> bool:
    """Whether a module is the user's: in ``folder``, where ranks look first, or in ``work`` and not installed there."""
    place, inside = _place(module, folder), work.resolve()
    return place is not None and (
        place == folder.resolve()
        or (place.is_relative_to(inside) and not any(map(_INSTALLED.fullmatch, place.relative_to(inside).parts)))
    )


def _place(module: str, folder: Path) -> Path | None:
    """The folder that has a module's package, with ``folder`` before Python's path; None if there is none.

    A folder of data hides no package: Python takes one that comes later before it.
    """
    spec = PathFinder.find_spec(module.partition(".")[0], [str(folder), *sys.path])
    found = spec and next(iter(spec.submodule_search_locations or ()), spec.origin)
    return Path(found).parent.resolve() if found else None
