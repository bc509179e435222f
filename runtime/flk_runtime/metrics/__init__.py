"""Metrics of a run: lines of JSON with loss and throughput, model FLOPs utilisation (MFU), and shares of the time.

Nothing is re-exported, as the modules are used by their names (`logging.line`, `mfu.Meter`).
"""
