"""Where 16-bit operands cannot meet the bounds: KDA here and in flash-linear-attention, on the same inputs, by rr.

    python benchmarks/beside_fla.py --out $OUT

Keys that repeat, keys longer than 1, and single tokens, whose heads are one inner product each. Both are judged by
tests/metrics.py against the float64 loop; nothing is timed. Writes OUT/beside_fla.txt.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import bench

bench.use_checkout()

import contract  # noqa: E402
import fastref  # noqa: E402
import metrics  # noqa: E402
import torch  # noqa: E402
from covering import load  # noqa: E402
from fla.ops.kda import chunk_kda  # noqa: E402
from inputs import make  # noqa: E402

PLACE = contract.Place("cuda", torch.bfloat16, 64, 64, fastref.reference)
KEYS = ("o", "ht", "dq", "dk", "dv", "dg", "dbeta", "dh0")


def fla(q, k, v, g, beta, **options):
    options.setdefault("scale", None)
    return chunk_kda(
        q.repeat_interleave(v.shape[2] // q.shape[2], 2),
        k.repeat_interleave(v.shape[2] // k.shape[2], 2),
        v,
        g,
        beta,
        **options,
    )


OPS = {"dplrgen": contract.of("kda"), "fla": fla}


def hard_keys() -> list[tuple[object, ...]]:
    rows = []
    for label, given in contract.hard_key_calls("kda", PLACE):
        ref = PLACE.reference("kda", *given)
        for name, op in OPS.items():
            got = metrics.collect(op, "kda", *given, output_final_state=True)
            rows.append((label, name, *(f"{metrics.rr(got[k], ref[k]):.1e}" for k in KEYS)))
    return rows


def single_tokens() -> list[tuple[object, ...]]:
    """How many of the covering design's calls of one token miss a rule, the whole tensor's and a head's apart."""
    missed = {name: [0, 0, 0] for name in OPS}
    for case in load():
        if case.variant != "kda" or case.T != 1 or case.dtype != "bfloat16":
            continue
        sizes = (case.B, case.T, case.H, case.HV, case.K, case.V)
        given = make("kda", *sizes, torch.bfloat16, regime=case.gates, seed=case.seed, device="cuda")
        ref = PLACE.reference("kda", *given)
        for name, op in OPS.items():
            got = metrics.collect(op, "kda", *given, output_final_state=True)
            found = metrics.check("kda", got, ref, torch.bfloat16, given[0])
            whole = [x for x in found if "(batch, head" not in x]
            missed[name] = [x + y for x, y in zip(missed[name], (1, bool(whole), bool(found)), strict=True)]
    return [(name, *counts) for name, counts in missed.items()]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    import fla as package

    about = bench.versions("cuda") | {"fla-core": package.__version__, "program": bench.generated("kda")._NAME}
    parts = [", ".join(f"{k} {v}" for k, v in about.items()), ""]
    parts += [bench.table(hard_keys(), ("keys", "op", *KEYS)), ""]
    parts += [bench.table(single_tokens(), ("one token", "calls", "miss a whole tensor's bound", "miss any rule"))]
    text = "\n".join(parts)
    (args.out / "beside_fla.txt").write_text(text + "\n")
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
