"""The user's request as data: the job, its file and flags, and the defaults of a namespace.

This package reads files and no network. `flk.manifest`, `flk.local`, `flk.jobs` and `flk.cli` import it; of flk it
imports only `flk.errors`. It re-exports nothing: pydantic is slow to import, and commands
that only check a name do not need it.
"""
