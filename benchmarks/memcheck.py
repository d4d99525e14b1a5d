"""Every kernel of a variant at small odd sizes, for a memory checker to watch.

    compute-sanitizer --tool memcheck --error-exitcode 9 python benchmarks/memcheck.py kda

A training step packed and not, with states, and a token step in place in a pool, in bfloat16 and float32. Judges
nothing itself; prints how many training steps ran.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import bench
import torch

bench.use_checkout()

import contract  # noqa: E402
from inputs import has_gate, make  # noqa: E402

SIZES = ((torch.bfloat16, 64, 60), (torch.float32, 33, 20), (torch.bfloat16, 33, 100))
BOUNDS = (None, (0, 37, 37, 101, 130), (-7, 60, 20, 500, 130))  # the last are out of order and range


def main(argv: Sequence[str] | None = None) -> int:
    (name,) = sys.argv[1:] if argv is None else argv
    regime, calls = "mild" if has_gate(name) else "zero", 0
    for dtype, K, V in SIZES:
        streams, h0, do, dht = make(name, 1, 140, 2, 4, K, V, dtype, regime=regime, device="cuda")
        for bounds in BOUNDS:
            if bounds is None:
                contract.run(name, streams, h0, do, dht)
            else:
                states = [x.detach().expand(len(bounds) - 1, -1, -1, -1).clone() for x in (h0, dht)]
                cu_seqlens = torch.tensor(bounds, device="cuda")
                contract.run(name, streams, states[0].requires_grad_(), do, states[1], cu_seqlens=cu_seqlens)
            calls += 1
        pool, slots = torch.randn(5, 4, K, V, device="cuda"), torch.tensor([4, -1, 0], device="cuda")
        token = [x.detach()[0, :3] for x in streams]
        getattr(contract.ops, f"{name}_step")(*token, pool, inplace=True, state_indices=slots)
    torch.cuda.synchronize()
    print(f"done {name} {calls}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
