"""PlainValues: the values of a state that are no tensors, as bytes that can be read back."""

from __future__ import annotations

import io
import itertools
import re
from collections.abc import Mapping
from typing import Any

import torch

from flk_runtime.errors import MismatchError

_GLOBAL = re.compile(r"GLOBAL (\S+)")  # in torch's message: the class that weights_only=True refuses
# A pickle names a class or a function by c, its module, a newline, its name and a newline.
_LONGEST = 200
_MODULE = re.compile(rb"c[\w.]{1,%d}\Z" % _LONGEST)
_NAME = re.compile(rb"[\w.]{1,%d}" % _LONGEST)


class PlainValues:
    """Serializes the plain values of one save after another, and reads them back if they have new classes."""

    def __init__(self) -> None:
        self._checked: set[tuple[bytes, bytes]] | None = None  # names in values that were read back; None: none yet

    def to_bytes(self, plain: Mapping[str, Any]) -> bytes:
        """The result of torch.save. Raises CheckpointError if a value cannot be saved, or not be read back."""
        buffer = io.BytesIO()
        try:
            torch.save(plain, buffer)
            values = buffer.getvalue()
            names = _names_in(values)
            if self._checked is None or not names <= self._checked:
                torch.load(io.BytesIO(values), weights_only=True)
                self._checked = names.union(self._checked or ())
        except Exception as error:
            raise MismatchError(
                f"cannot save this state: {_refusal(plain, error)}; a state_dict may hold tensors, numbers, strings, "
                "lists, tuples and dictionaries"
            ) from error
        return values


def _names_in(values: bytes) -> set[tuple[bytes, bytes]]:
    """The modules and names of classes and functions in the result of torch.save; a few more may be none.

    Only what is around newlines is looked at. Digits of random states are full of c's, and to try a pattern at each
    one takes five times as long as torch.save.
    """
    lines = values.split(b"\n")
    return {
        (module[0], name)
        for before, name in itertools.pairwise(lines[:-1])
        if _NAME.fullmatch(name) and (module := _MODULE.search(before, max(0, len(before) - _LONGEST - 1)))
    }


def _refusal(plain: Mapping[str, Any], error: Exception) -> str:
    """Why the plain values cannot be saved, or not be read back: ``error``, and the object that it is about."""
    found = _GLOBAL.search(str(error))
    reason = (
        f"holds a {found[1]}" if found else f"cannot be saved and read back: {(str(error).splitlines() or [''])[0]}"
    )
    for name, state in {**plain.get("objects", {}), **plain.get("own", {})}.items():
        buffer = io.BytesIO()
        try:
            torch.save(state, buffer)
            buffer.seek(0)
            torch.load(buffer, weights_only=True)
        except Exception:
            return f"the state_dict() of {name} {reason}"
    return f"it {reason}"
