"""Runs pieces of the generated kernels alone in Triton's interpreter and prints what they make, as one JSON object.

    TRITON_INTERPRET=1 python helpers_worker.py

A process of its own: the variable is read when a kernel's file is imported.
"""

from __future__ import annotations

import json
import math

import emulation
import torch
import triton
import triton.language as tl

from dplrgen.generated.kda import _dot_fine, _in_range, _inverse, _load_rows, _store_rows

SIZE = 16


@triton.jit
def _product(x_ptr, y_ptr, out, DOT: tl.constexpr, X: tl.constexpr, Y: tl.constexpr, N: tl.constexpr):
    at = tl.arange(0, N)
    x = _load_rows(x_ptr, at, at, N, N, N, True)
    y = _load_rows(y_ptr, at, at, N, N, N, True)
    _store_rows(out, _dot_fine(x, y, DOT, "tf32", X, Y), at, at, N, N, N, True)


@triton.jit
def _ranged(x_ptr, out, unit_out, SCALED: tl.constexpr, N: tl.constexpr):
    at = tl.arange(0, N)
    x, unit = _in_range(_load_rows(x_ptr, at, at, N, N, N, True), SCALED)
    if SCALED:  # what the trees multiply
        x = x.to(tl.float16).to(tl.float32)
    _store_rows(out, x, at, at, N, N, N, True)
    tl.store(unit_out, unit)


def error(first: bool, second: bool, coarse: str, dot: tl.dtype = tl.float16) -> float:
    """rr of a product in parts of two float32 tiles; `coarse` names an operand that one float16 part holds exactly."""
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(2, SIZE, SIZE, generator=generator)
    x, y = (t.half().float() if name in coarse else t for name, t in (("x", x), ("y", y)))
    out = torch.empty(SIZE, SIZE)
    _product[(1,)](x, y, out, DOT=dot, X=first, Y=second, N=SIZE)
    want = x.double() @ y.double()
    return float((out - want).norm() / want.norm())


@triton.jit
def _inverted(n_ptr, out, DOT: tl.constexpr, REFINE: tl.constexpr, N: tl.constexpr):
    at = tl.arange(0, N)
    n = _load_rows(n_ptr, at, at, N, N, N, True)
    _store_rows(out, _inverse(n, at, N, 6, DOT, "tf32", REFINE), at, at, N, N, N, True)


def inverse_error(refine: bool, dot: tl.dtype = tl.bfloat16) -> float:
    """Largest distance of (I + N)^-1 where all keys of a chunk are equal and beta is 1.99, over its largest element."""
    n = torch.full((64, 64), 1.99).tril(-1)
    out = torch.empty_like(n)
    _inverted[(1,)](n, out, DOT=dot, REFINE=refine, N=64)
    want = torch.linalg.inv(torch.eye(64).double() + n.double())
    return float((out - want).abs().max() / want.abs().max())


def ranged(size: float, scaled: bool = True) -> dict[str, float]:
    """Largest element and power of a tile of that size, and whether their product is the tile to the bit."""
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(SIZE, SIZE, generator=generator).half().float() * 2.0 ** round(math.log2(size or 1)) * (size != 0)
    out, unit = torch.empty_like(x), torch.empty(1)
    _ranged[(1,)](x, out, unit, SCALED=scaled, N=SIZE)
    same = torch.equal(out.double() * unit.double(), x.double()) or bool(torch.equal(out * unit, x))
    return {"largest": float(out.abs().max()), "unit": float(unit), "same": float(same)}


def overflowing() -> bool:
    """Infinity stays infinite, so that it is seen."""
    x = torch.full((SIZE, SIZE), float("inf"))
    out, unit = torch.empty_like(x), torch.empty(1)
    _ranged[(1,)](x, out, unit, SCALED=True, N=SIZE)
    return bool((out == float("inf")).all())


def keeps_nan(bits: int) -> dict[str, bool]:
    """Whether one element of these bits, which are not finite, shows in a product in parts and in an inverse."""
    n = torch.full((64, 64), 0.5).tril(-1)
    n.view(torch.int32)[40, 3] = bits
    shown = {}
    for refine in (False, True):
        out = torch.empty_like(n)
        _inverted[(1,)](n, out, DOT=tl.float32, REFINE=refine, N=64)
        shown[f"inverse {refine}"] = not out.isfinite().all()
    x, y, out = torch.ones(SIZE, SIZE), torch.ones(SIZE, SIZE), torch.empty(SIZE, SIZE)
    x.view(torch.int32)[3, 4] = bits
    _product[(1,)](x, y, out, DOT=tl.float32, X=False, Y=True, N=SIZE)
    shown["product"] = not out.isfinite().all()
    return {k: bool(v) for k, v in shown.items()}


if __name__ == "__main__":
    emulation.install()
    print(
        json.dumps(
            {
                "plain": error(False, False, ""),
                "x": error(True, False, "y"),
                "y": error(False, True, "x"),
                "both": error(True, True, ""),
                "tf32": error(False, False, "", tl.float32),
                "tf32 in parts": error(True, True, "", tl.float32),
                "inverse": inverse_error(False),
                "refined": inverse_error(True),
                "refined in tf32": inverse_error(True, tl.float32),
                "ranged": {str(size): ranged(size) for size in (1e-30, 1e-9, 0.3, 7e4, 1e30)},
                "zero": ranged(0.0),
                "not scaled": ranged(1e30, False),
                "infinite": overflowing(),
                "kept": [keeps_nan(bits) for bits in (0x7FFFFFFF, -1, 0x7FC00000, 0x7F800000)],
            }
        )
    )
