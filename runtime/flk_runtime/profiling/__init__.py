"""Profiles of ranks that run, for `flk profile`. No job ships this package: flk sends its modules when it profiles.

`flk_runtime.profiling.ask` runs as a program in the container of a rank and finds the rank's observer, which executes
`flk_runtime.profiling.rank` in the rank.
"""
