"""The names of ``import flk_runtime``."""

from __future__ import annotations

from importlib import import_module

import flk_runtime


def test_every_public_name_is_in_the_module_of_the_table() -> None:
    for name, module in flk_runtime._MODULES.items():
        assert getattr(import_module(f"flk_runtime.{module}"), name) is getattr(flk_runtime, name)
    assert {*flk_runtime._MODULES, "__version__"} == set(flk_runtime.__all__)
