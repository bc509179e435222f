"""Telemetry of a job: what its launchers measure and keep for `flk top`, `flk report` and the metrics page.

- `usage`: what this pod uses of its processors, memory and GPUs, and the thread that reads it at intervals
- `health`: the check of the pod, its GPUs included
- `keeper`: the measurements of all pods, in the launcher of pod 0
- `metrics_page`: the page of Prometheus
"""
