"""Compression of outer gradients: float32 vectors as bytes of fp32, fp16, int8 or int4."""

from __future__ import annotations

import ctypes

import torch

BLOCK = 1024  # values that share a scale
_HALF_BITS = 15  # the largest values of a block have this exponent in fp16, so that its small ones keep their digits
_LARGEST = {"int8": 127, "int4": 7}  # what the largest value of a block becomes
_BITS = {"fp32": 32, "fp16": 16, "int8": 8, "int4": 4}  # of a value
_TINY = torch.finfo(torch.float32).tiny


def encode(values: torch.Tensor, dtype: str) -> bytes:
    """``values``, float32 of shape (n,) on the CPU, as bytes of ``dtype``: fp32, fp16, int8 or int4.

    All but fp32 have a scale of float32 for each `BLOCK` values; the scales come first. The largest value of a block
    becomes 127 in int8 and 7 in int4, of which a byte holds two. In fp16 the scale is a power of 2, which rounds
    nothing.
    """
    if dtype == "fp32":
        return _to_bytes(values)
    blocks = torch.nn.functional.pad(values, (0, -len(values) % BLOCK)).view(-1, BLOCK)
    largest = blocks.abs().amax(dim=1, keepdim=True)
    if dtype == "fp16":
        scales = torch.exp2((torch.frexp(largest).exponent - _HALF_BITS).float()).clamp_min(_TINY)
        steps = (blocks / scales).half()
    else:
        scales = largest / _LARGEST[dtype]
        steps = (blocks / scales.clamp_min(_TINY)).round_().clamp_(-_LARGEST[dtype], _LARGEST[dtype]).to(torch.int8)
    steps, count = steps.flatten(), len(values)
    if dtype == "int4":
        low, high = steps.view(-1, 2).unbind(1)
        steps, count = (low & 15) | (high << 4), -(-count // 2)
    return _to_bytes(scales.flatten()) + _to_bytes(steps[:count])


def decode(data: bytes | bytearray, dtype: str, count: int) -> torch.Tensor:
    """The float32 vector of shape (count,) that `encode` wrote. Raises ValueError if the length does not fit."""
    if len(data) != encoded_size(dtype, count):
        raise ValueError(f"{len(data)} bytes are not {count} values of {dtype}")
    writable = bytearray(data) if isinstance(data, bytes) else data
    if not count:
        return torch.zeros(0, dtype=torch.float32)
    if dtype == "fp32":
        return torch.frombuffer(writable, dtype=torch.float32)
    number = -(-count // BLOCK)
    scales = torch.frombuffer(writable, dtype=torch.float32, count=number)
    steps = torch.frombuffer(writable, dtype=torch.float16 if dtype == "fp16" else torch.int8, offset=4 * number)
    if dtype == "int4":  # a shift to the right keeps the sign
        steps = torch.stack(((steps << 4) >> 4, steps >> 4), dim=1).flatten()[:count]
    return steps.float() * scales.repeat_interleave(BLOCK)[:count]


def encoded_size(dtype: str, count: int) -> int:
    """The number of bytes of ``count`` values."""
    blocks = 0 if dtype == "fp32" else -(-count // BLOCK)
    return -(-_BITS[dtype] * count // 8) + 4 * blocks


class ErrorFeedback:
    """Encodes vectors, and adds to each the error of the encoding before it (Seide et al., Interspeech 2014).

    ``residual`` is that error, float32 of shape (n,). Only int8 and int4 have one: fp16 keeps each value
    to 1 in 2,000, down to a billionth of the largest in its block.
    """

    def __init__(self, dtype: str, count: int) -> None:
        self._dtype = dtype
        self.residual = torch.zeros(count if dtype in _LARGEST else 0, dtype=torch.float32)

    def encode(self, values: torch.Tensor) -> bytes:
        """The bytes of ``values``, float32 of shape (n,), with the residual added."""
        if self._dtype not in _LARGEST:
            return encode(values, self._dtype)
        values = values + self.residual
        data = encode(values, self._dtype)
        self.residual = values - decode(data, self._dtype, len(values))
        return data


def _to_bytes(values: torch.Tensor) -> bytes:
    # Not through NumPy, which an image need not have.
    values = values.contiguous()
    # Nor by string_at, whose size is an int of C: from 2 GiB on it would be negative.
    return (ctypes.c_char * values.nbytes).from_address(values.data_ptr()).raw
