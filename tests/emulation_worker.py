"""Products of small tiles in the corrected interpreter, beside the same in float64; prints one JSON object."""

from __future__ import annotations

import json

import emulation
import torch
import triton
import triton.language as tl

SIZE = 16


@triton.jit
def _product(x_ptr, y_ptr, out, DOT: tl.constexpr, PRECISION: tl.constexpr):
    at = tl.arange(0, 16)[:, None] * 16 + tl.arange(0, 16)[None, :]
    x, y = tl.load(x_ptr + at).to(DOT), tl.load(y_ptr + at).to(DOT)
    tl.store(out + at, tl.dot(x, y, input_precision=PRECISION))


@triton.jit
def _rounded(x_ptr, out):
    at = tl.arange(0, 16)[:, None] * 16 + tl.arange(0, 16)[None, :]
    tl.store(out + at, tl.load(x_ptr + at).to(tl.bfloat16))


def error(dot: tl.dtype, precision: str, x: torch.Tensor, y: torch.Tensor, like: tuple) -> float:
    """Largest relative distance of the kernel's product from that of the tiles given last."""
    out = torch.empty(SIZE, SIZE)
    _product[(1,)](x, y, out, DOT=dot, PRECISION=precision)
    want = like[0].double() @ like[1].double()
    return float((out - want).abs().max() / want.abs().max())


if __name__ == "__main__":
    emulation.install()
    x, y = torch.randn(2, SIZE, SIZE, generator=torch.Generator().manual_seed(1))
    # Small whole numbers over a power of two: products of these are exact in float32.
    small = [(t * 8).round() / 8 for t in (x, y)]
    odd = [t + 2.0**-13 for t in small]  # beyond the digits of TF32 for all but the least
    cut = [torch.from_numpy(emulation.cut(t.numpy())) for t in odd]
    near = torch.empty(SIZE, SIZE, dtype=torch.bfloat16)
    _rounded[(1,)](x, near)
    print(
        json.dumps(
            {
                "bfloat16": error(tl.bfloat16, "ieee", *small, tuple(small)),
                "tf32": error(tl.float32, "tf32", *odd, tuple(cut)),
                "tf32 beside float32": error(tl.float32, "tf32", *odd, tuple(odd)),
                "ieee": error(tl.float32, "ieee", *odd, tuple(odd)),
                "rounding": torch.equal(near, x.bfloat16()),
            }
        )
    )
