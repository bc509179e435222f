"""Options of DiLoCo as data, and the membership of this worker, which the environment describes."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

from flk_runtime.contract import pod_env, user_env
from flk_runtime.contract.options import DILOCO, INNER_STRATEGIES, OUTER_DTYPES, parse_strategy
from flk_runtime.contract.variable import is_count
from flk_runtime.errors import SetupError, setting


@dataclass(frozen=True)
class DiLoCo:
    """How the workers of strategy diloco train together; pass it to `flk_runtime.init` as ``strategy=``.

    The outer optimizer has DiLoCo's defaults (Douillard et al., arXiv 2311.08105, section 3.1).
    """

    strategy: ClassVar[str] = DILOCO
    inner: str = "ddp"  # strategy of the ranks within a worker
    every: int = 100  # inner steps between two rounds
    dtype: str = "fp16"  # of outer gradients on the wire: fp32, fp16, int8 or int4; the last two with error feedback
    lr: float = 0.7  # of the outer optimizer, SGD
    momentum: float = 0.9  # Nesterov momentum of the outer optimizer; 0: none
    sites: int = 1  # jobs that train together, all with the same number of workers
    site: int = 0  # number of this job among them, from 0
    wait: float = 300.0  # seconds that the first workers wait for the others before they begin without them
    timeout: float = 600.0  # seconds that a round waits for a worker which is late

    def __post_init__(self) -> None:
        for name, problem in (
            ("inner", self._inner_problem()),
            (
                "dtype",
                self.dtype not in OUTER_DTYPES and f"expected one of {', '.join(OUTER_DTYPES)}",
            ),
            ("every", not is_count(self.every, 1) and "expected an integer, 1 or more"),
            ("lr", not 0 < self.lr < float("inf") and "expected a number above 0"),
            ("momentum", not 0 <= self.momentum < 1 and "expected a number from 0 to below 1"),
            ("sites", not is_count(self.sites, 1) and "expected an integer, 1 or more"),
            ("site", not is_count(self.site, 0) and "expected an integer, 0 or more"),
            ("wait", not 0 <= self.wait < float("inf") and "expected a number of seconds, 0 or more"),
            ("timeout", not 0 < self.timeout < float("inf") and "expected a number of seconds above 0"),
        ):
            if problem:
                raise SetupError(f"diloco {name}={getattr(self, name)!r}: {problem}")
        if self.site >= self.sites:
            raise SetupError(f"diloco site={self.site}: there are {self.sites} sites, counted from 0")

    def _inner_problem(self) -> str:
        try:
            name = parse_strategy(self.inner)
        except ValueError as error:
            return str(error)
        object.__setattr__(self, "inner", name)
        return "" if name in INNER_STRATEGIES else "expected a strategy of the ranks within a worker"

    @classmethod
    def parse(cls, text: str) -> DiLoCo:
        """The options that ``text`` names as KEY=VALUE, separated by commas. Raises SetupError."""
        kinds: dict[str, Any] = {each.name: type(each.default) for each in fields(cls)}
        given: dict[str, Any] = {}
        for part in filter(None, (piece.strip() for piece in text.split(","))):
            name, equals, value = part.partition("=")
            if name not in kinds or not equals:
                raise SetupError(f"diloco {part!r}: expected KEY=VALUE with a key of {', '.join(kinds)}")
            try:
                given[name] = kinds[name](value)
            except ValueError:
                raise SetupError(f"diloco {name}={value!r}: expected a number") from None
        return cls(**given)


@dataclass(frozen=True)
class Membership:
    """Which worker this process belongs to, and where the workers meet."""

    worker: int = 0  # number of the worker among all sites'
    workers: int = 1  # of all sites
    address: str = ""  # host:port of the hub; empty: this worker trains alone
    secret: str = field(default="", repr=False)

    @classmethod
    def read(cls, options: DiLoCo, environ: Mapping[str, str] = os.environ) -> Membership:
        """The membership that the launcher's variables describe. Raises SetupError."""
        local, count = setting(user_env.WORKER, environ), setting(user_env.WORKERS, environ)
        if local >= count:
            raise SetupError(f"{user_env.WORKER}={local}: there are {count} workers ({user_env.WORKERS})")
        address = environ.get(pod_env.SERVICE_ADDRESS, "")
        workers = count * options.sites
        if workers > 1 and not address:
            raise SetupError(
                f"strategy diloco has {workers} workers and no address where they meet: set {pod_env.SERVICE_ADDRESS} "
                "to the host:port of the first pod of site 0"
            )
        return cls(
            options.site * count + local,
            workers,
            address,
            environ.get(pod_env.SERVICE_SECRET) or environ.get(pod_env.SERVICE_KEY, ""),
        )


def environment_options() -> DiLoCo:
    """The options of $FLK_DILOCO, else the defaults. Raises SetupError."""
    try:
        return DiLoCo.parse(os.environ.get(pod_env.DILOCO_OPTIONS, ""))
    except SetupError as error:
        raise SetupError(f"{error} (from {pod_env.DILOCO_OPTIONS})") from None
