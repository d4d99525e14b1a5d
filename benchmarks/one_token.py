"""How often one token's gradients miss the rule on single heads when nothing but operands of products is rounded.

    python benchmarks/one_token.py [--calls 500]

KDA at T = 1 in float64, the states S and dS rounded to bfloat16 where they enter a product, once, as one product of
16-bit operands rounds them; v and do, which are bfloat16 already, are not. dbeta of a head is then one inner product,
and so is dq up to a known vector: where it cancels, the rounding stays. Prints the share of calls (2 rows of 6 heads,
states in and out, the law of tests/inputs.py) in which some head is off by more than twice its bound.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import bench
import torch
from torch import Tensor

bench.use_checkout()

import metrics  # noqa: E402
from inputs import REGIMES, make  # noqa: E402


def gradients(streams: Sequence[Tensor], h0: Tensor, do: Tensor, dht: Tensor, rounded: bool) -> dict[str, Tensor]:
    """dq and dbeta of one token, `[B, HV, K]` and `[B, HV]`, from the recurrence's own formulas."""

    def operand(x: Tensor) -> Tensor:
        return x.to(torch.bfloat16).double() if rounded else x

    q, k, v, g, beta, do, h0, dht = (x.detach().double() for x in (*streams, do, h0, dht))
    q, k, v, g, beta, do = (x[:, 0] for x in (q, k, v, g, beta, do))
    group = v.shape[1] // q.shape[1]
    q, k = (x.repeat_interleave(group, 1) for x in (q, k))
    scale, decay = k.shape[-1] ** -0.5, g.exp()
    read = torch.einsum("bhk,bhkv->bhv", decay * k, operand(h0))
    new = beta[..., None] * (v - read)
    dnew = scale * (q * k).sum(-1, keepdim=True) * do + torch.einsum("bhk,bhkv->bhv", k, operand(dht))
    dq = torch.einsum("bhv,bhkv->bhk", do, operand(h0)) * decay + (do * new).sum(-1, keepdim=True) * k
    return {"dq": scale * dq, "dbeta": (dnew * (v - read)).sum(-1)}


def missed(calls: int, size: int, regime: str) -> dict[str, int]:
    """Calls with a head off by more than twice its bound, by gradient."""
    found = {"dq": 0, "dbeta": 0}
    for seed in range(calls):
        given = make("kda", 2, 1, 3, 6, size, size, torch.bfloat16, regime=regime, seed=seed)
        exact, rounded = gradients(*given, False), gradients(*given, True)
        for key, want in exact.items():
            error, ref = ((x if x.dim() == 3 else x[..., None]).norm(dim=-1) for x in (rounded[key] - want, want))
            found[key] += bool((error > 2 * metrics.bound(key, torch.bfloat16) * ref).any())
    return found


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--calls", type=int, default=500)
    args = parser.parse_args(argv)
    rows = []
    for size in (64, 128):
        for regime in REGIMES:
            found = missed(args.calls, size, regime)
            rows.append((size, regime, *(f"{100 * found[key] / args.calls:.1f} %" for key in ("dq", "dbeta"))))
    print(bench.table(rows, ("K = V", "gates", "dq", "dbeta")))
    return 0


if __name__ == "__main__":
    sys.exit(main())
