"""Where 16-bit operands cannot hold what is left: KDA here and in flash-linear-attention on the same inputs, by rr.

    python benchmarks/beside_fla.py keys-64 keys-128 tokens

bfloat16, on keys that are all equal (keys-SIZE) and on the covering design's calls of one token (tokens), whose heads
are one inner product each. Both are judged by tests/metrics.py against the float64 loop; nothing is timed, so fla's
kernels take the first of the configurations that it would choose from by time. (fla's gated DeltaNet refuses its
backward on Hopper with Triton before 3.7.1.)
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Sequence

import bench

bench.use_checkout()

import contract  # noqa: E402
import fastref  # noqa: E402
import metrics  # noqa: E402
import torch  # noqa: E402
import triton  # noqa: E402
from covering import load  # noqa: E402
from inputs import make  # noqa: E402
from oracles import names  # noqa: E402

STRENGTHS, GATES, T = (1.0, 1.8, 1.99), (0.0, -0.001), 150


def implementations() -> dict[str, object]:
    from fla.ops.kda import chunk_kda

    def peer(q, k, v, g, beta, **options):
        q, k = (x.repeat_interleave(v.shape[2] // x.shape[2], 2) for x in (q, k))
        return chunk_kda(q, k, v, g, beta, **options)

    return {"dplrgen": contract.of("kda"), "fla": peer}


def equal_keys(size: int) -> list[tuple[object, ...]]:
    """rr of whole tensors with one key for all tokens."""
    rows = []
    place = contract.Place("cuda", torch.bfloat16, size, size, fastref.reference)
    key = torch.nn.functional.normalize(torch.randn(2, size, generator=torch.Generator().manual_seed(5)), dim=-1)
    for beta, g in itertools.product(STRENGTHS, GATES):
        given = contract.filled("kda", place.inputs("kda", T, regime="weak", seed=6), k=key, beta=beta, g=g)
        ref = fastref.reference("kda", *given)
        for label, op in implementations().items():
            got = metrics.collect(op, "kda", *given, output_final_state=True)
            rows.append((size, beta, g, label, *(f"{metrics.rr(got[k], ref[k]):.1e}" for k in columns())))
    return rows


def columns() -> list[str]:
    return ["o", "ht", "dh0", *(f"d{n}" for n in names("kda"))]


def single_tokens() -> list[tuple[object, ...]]:
    """How many of the covering design's calls of one token miss a rule, those on whole tensors apart."""
    counts = {label: [0, 0, 0] for label in implementations()}
    for case in load():
        if case.variant != "kda" or case.T != 1 or case.dtype != "bfloat16":
            continue
        sizes = (case.B, case.T, case.H, case.HV, case.K, case.V)
        given = make("kda", *sizes, torch.bfloat16, regime=case.gates, seed=case.seed, device="cuda")
        ref = fastref.reference("kda", *given)
        for label, op in implementations().items():
            got = metrics.collect(op, "kda", *given, output_final_state=True)
            found = metrics.check("kda", got, ref, torch.bfloat16, given[0])
            whole = [line for line in found if "(batch, head" not in line]
            counts[label] = [x + y for x, y in zip(counts[label], (1, bool(whole), bool(found)), strict=True)]
    return [(label, *count) for label, count in counts.items()]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("parts", nargs="+", choices=["keys-64", "keys-128", "tokens"])
    args = parser.parse_args(argv)
    import fla

    triton.runtime.autotuner.Autotuner.prune_configs = lambda self, kwargs: self.configs[:1]
    about = bench.versions("cuda") | {"fla-core": fla.__version__, "programs": bench.generated("kda")._NAME}
    print(", ".join(f"{k} {v}" for k, v in about.items()))
    for part in args.parts:
        if part == "tokens":
            head = ("one token", "calls", "miss a whole tensor's bound", "miss any rule")
            print(f"\n{bench.table(single_tokens(), head)}")
        else:
            head = ("keys equal, K = V", "beta", "g", "op", *columns())
            print(f"\n{bench.table(equal_keys(int(part[5:])), head)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
