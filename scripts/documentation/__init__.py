"""Tools that keep the documentation true: parse pages, run their commands, generate the reference.

Developers call them through `make docs` and `make outputs`; tests import `scripts.documentation.pages`.
"""
