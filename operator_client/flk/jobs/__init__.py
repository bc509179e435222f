"""Jobs in a cluster: create, list, follow, wait for and delete them, read their state and their logs.

`JobClient` sends the requests, `flk.jobs.state` derives what they mean, `JobHandle` is the public interface to one job.
Commands and `flk/__init__` import it; it imports `flk.kube` and, where a job is made, `flk.manifest`.
It re-exports nothing: `flk status` must not import what `flk submit` needs.
"""
