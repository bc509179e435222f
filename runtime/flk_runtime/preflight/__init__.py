"""Preflight: before the process group opens, the ranks connect to one store and compare their reports.

A fault that would otherwise show as a job that hangs is one sentence on every rank. `training` and `check` import
this package. `connect_store` is imported from `bootstrap`, not from here: that module imports torch, and `check` reads
RankReport before torch is imported.
"""

from flk_runtime.preflight.compare import compare, missing
from flk_runtime.preflight.exchange import exchange_reports
from flk_runtime.preflight.report import RankReport

__all__ = ["RankReport", "compare", "exchange_reports", "missing"]
