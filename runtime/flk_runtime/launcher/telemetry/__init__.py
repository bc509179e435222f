"""Telemetry of a job: what its launchers measure and keep for `flk top`, `flk report` and the metrics page.

- `usage`: what this pod uses of its processors, memory, networks and disks
- `gpus`: what its GPUs do
- `meter`: the thread that reads both at intervals
- `history`: the samples of a job, bounded
- `keeper`: the measurements of all pods, in the launcher of pod 0
"""
