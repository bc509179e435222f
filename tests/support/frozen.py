"""Imported last by the fork server: what is imported until then is garbage of no process that it forks."""

from __future__ import annotations

import gc

gc.freeze()
