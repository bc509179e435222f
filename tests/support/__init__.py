"""Support for test modules: the fake API server, processes and ports, commands, ranks, and what a test may install.

Test modules and the `conftest.py` files import it; nothing outside `tests` and `benchmarks` does. Fixtures are in the
`conftest.py` of each folder; here are plain functions and classes.
"""
