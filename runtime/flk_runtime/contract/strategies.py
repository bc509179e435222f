"""Names of the strategies."""

from __future__ import annotations

from typing import Final

AUTO: Final = "auto"  # in place of a value that flk chooses: of a strategy, the steps between saves, a target, a gang
DILOCO: Final = "diloco"
# Strategies of ranks that train one model. Those from no_shard on are named as in torch's FSDP ShardingStrategy;
# no_shard is the same as ddp.
INNER_STRATEGIES: Final = ("ddp", "no_shard", "shard_grad_op", "full_shard", "hybrid_shard", "hybrid_shard_zero2")
# Values of --strategy. auto has the ranks choose one of the values before it at their start. diloco trains several
# workers, each with an inner strategy.
STRATEGIES: Final = ("none", *INNER_STRATEGIES, AUTO, DILOCO)
OUTER_DTYPES: Final = ("fp32", "fp16", "int8")  # of the tensors that workers of strategy diloco send to each other


def parse_strategy(text: str) -> str:
    """Return the strategy that ``text`` names, as written in STRATEGIES or in torch (FULL_SHARD, _HYBRID_SHARD_ZERO2).

    Raises ValueError, with the list of names, if there is no such strategy.
    """
    name = text.lower().replace("-", "_").lstrip("_")
    if name not in STRATEGIES:
        raise ValueError(f"unknown strategy {text!r}: expected one of {', '.join(STRATEGIES)}")
    return name
