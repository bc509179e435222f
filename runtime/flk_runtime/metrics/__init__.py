"""Metrics of a run: lines of JSON with loss and throughput, and model FLOPs utilisation (MFU).

`run` imports the two modules. Nothing is re-exported, as both are used by their names (`logging.line`, `mfu.Meter`).
"""
