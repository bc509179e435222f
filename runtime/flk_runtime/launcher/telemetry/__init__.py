"""Telemetry of a job: what its launchers measure and keep for `flk top`, `flk report` and the metrics page.

- `usage`: what this pod uses of its processors, memory, networks and disks, and the thread that reads it at intervals
- `gpus`: what its GPUs do, and whether they are healthy; `health` is the check of the whole pod
- `keeper`: the measurements of all pods, in the launcher of pod 0
- `metrics_page`: the page of Prometheus
"""
