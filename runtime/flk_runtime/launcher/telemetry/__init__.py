"""Telemetry of a job: what its launchers measure and keep for `flk top`, `flk report` and the metrics page.

- `usage`: what this pod uses of its processors, memory, networks and disks, and the thread that reads it at intervals
- `gpus`: what its GPUs do
- `keeper`: the measurements of all pods, in the launcher of pod 0
"""
