"""Imported last by the fork server: what is imported until then is garbage of no process that it forks."""

import gc

gc.freeze()
