"""The bundled GPT example, as a script and as a module."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any, Final

EXAMPLE: Final = Path(__file__).parents[1] / "examples" / "gpt" / "train.py"


def load_example() -> Any:
    """The module of the example."""
    spec = importlib.util.spec_from_file_location("gpt_example", EXAMPLE)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
