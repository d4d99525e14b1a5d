"""Triton's interpreter with the products of a GPU: bfloat16 ones right, TF32 ones with operands cut off.

The interpreter multiplies bfloat16 tiles as the integers that hold them, cuts float32 off where it is rounded to
bfloat16, and multiplies in IEEE float32 where TF32 is asked for. Corrected, kernels lose the digits here that they lose
on a GPU. To be imported in a process that has TRITON_INTERPRET=1.
"""

from __future__ import annotations

import numpy as np
import triton.language as tl
from triton.runtime import interpreter

Array = np.ndarray
Handle = interpreter.TensorHandle


def widened(bits: Array) -> Array:
    """float32 of bfloat16 bits."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def rounded(x: Array) -> Array:
    """bfloat16 bits of float32, to nearest, ties to even."""
    bits = np.ascontiguousarray(x, dtype=np.float32).view(np.uint32)
    near = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(x), np.uint16(0x7FC0), near)


def cut(x: Array) -> Array:
    """What a matrix unit takes of a float32 in TF32: the upper 19 bits."""
    return (np.ascontiguousarray(x, dtype=np.float32).view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)


def _converted(x: Handle, to: tl.dtype) -> Handle | None:
    pair = (x.dtype.scalar, to.scalar)
    if pair == (tl.bfloat16, tl.float32):
        return Handle(widened(x.data), tl.float32)
    if pair == (tl.float32, tl.bfloat16):
        return Handle(rounded(x.data), tl.bfloat16)
    return None


def _dot(builder, a: Handle, b: Handle, d: Handle, input_precision, _imprecise) -> Handle:
    x, y = a.data, b.data
    if a.dtype.scalar == tl.bfloat16:
        x, y = widened(x), widened(y)
    elif a.dtype.scalar == tl.float32 and str(input_precision).upper().endswith("TF32"):
        x, y = cut(x), cut(y)
    return Handle(np.matmul(x, y, dtype=d.data.dtype) + d.data, d.dtype.scalar)


def install() -> None:
    builder = interpreter.InterpreterBuilder
    for name in ("cast_impl", "create_fp_to_fp", "create_fp_ext", "create_fp_trunc"):
        plain = getattr(builder, name)

        def convert(self, x, to, *more, plain=plain):
            done = _converted(x, to)
            return plain(self, x, to, *more) if done is None else done

        setattr(builder, name, convert)
    builder.create_dot = _dot
