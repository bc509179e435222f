"""Benchmarks of strategies: the job that measures them, its result, and where results are kept.

The command `flk bench` imports this package. `flk_plan.bench` is the side of the ranks.
"""

from flk.bench.job import bench_job
from flk.bench.result import BenchResult, kept_results, measured

__all__ = ["BenchResult", "bench_job", "kept_results", "measured"]
