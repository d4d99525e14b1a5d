"""Every case of covering.json on a GPU: forward and backward of the public function against the float64 recurrence.

    python benchmarks/check_gpu.py --out $OUT                    the design and the products
    python benchmarks/check_gpu.py --out $OUT --configs          every kernel configuration that can be chosen
    python benchmarks/check_gpu.py --out DIR --device cpu --first 20 --workers 2

Judged by tests/metrics.py: bounds on outputs and all gradients, as a whole, a head and a block of 16 rows. Memory that
a kernel leaves unwritten holds NaN. Cases run in worker processes, compiling side by side; a crash of one, an illegal
access say, is that case's failure, and a fresh process takes the next. Writes DIR/NAME.jsonl, a row a case, and
DIR/NAME.txt, the summary that is printed last. Exit code 1 if a case fails, 2 if some were not run.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import json
import math
import os
import random
import re
import sys
import time
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import bench
from bench import Json
from covering import DTYPES, SEED, VARIANTS, Case, load

SHOWN = 25
STRONG = ("strong", "spikes")
CONFIG_LENGTHS = (65, 1000)


# ---------------------------------------------------------------------------------------------------------------------
# One case


def dtypes_of(name: str) -> tuple[Any, Any]:
    """The dtypes of the streams and of the gates."""
    import torch

    streams, _, gates = name.partition("+")
    return getattr(torch, streams), getattr(torch, gates or streams)


@contextlib.contextmanager
def unwritten_memory_is_nan() -> Iterator[None]:
    """New tensors are filled with NaN, so that an element that nobody writes shows."""
    import torch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = True
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(False)


def judge(case: Case, device: str, poison: bool = True) -> Json:
    """The case's row: what failed, rr of every tensor, seconds."""
    import fastref
    import metrics
    import torch
    from inputs import make

    start = time.monotonic()
    dtype, gate_dtype = dtypes_of(case.dtype)
    sizes = (case.B, case.T, case.H, case.HV, case.K, case.V)
    streams, h0, do, dht = make(
        case.variant,
        *sizes,
        dtype,
        gate_dtype=gate_dtype,
        regime=case.gates,
        seed=case.seed,
        state=case.states in ("in", "both"),
        device=device,
    )
    final = case.states in ("out", "both")
    dht = dht if final else None
    op = getattr(bench.generated(case.variant), case.variant)
    drawn = time.monotonic()
    with unwritten_memory_is_nan() if poison else contextlib.nullcontext():
        got = metrics.collect(op, case.variant, streams, h0, do, dht, None, output_final_state=final)
        _wait(device)
    ran = time.monotonic()
    ref = fastref.reference(case.variant, streams, h0, do, dht)
    if not final:
        del ref["ht"]
    failures = metrics.check(case.variant, got, ref, dtype, streams) + _wrong_dtypes(case.variant, got, streams, h0)
    figures = {key: _finite(value) for key, value in metrics.worst(got, ref).items()}
    del got, ref
    if device == "cuda" and torch.cuda.memory_reserved() > 4 << 30:
        torch.cuda.empty_cache()
    seconds = {"draw": drawn - start, "op": ran - drawn, "judge": time.monotonic() - ran}
    return {"failures": failures, "rr": figures, "seconds": {key: round(x, 3) for key, x in seconds.items()}}


def _wait(device: str) -> None:
    if device == "cuda":
        import torch

        torch.cuda.synchronize()


def _finite(x: float) -> float | None:
    return x if math.isfinite(x) else None


def _wrong_dtypes(variant: str, got: dict[str, Any], streams: Sequence[Any], h0: Any) -> list[str]:
    from oracles import names

    leaves = dict(zip([f"d{n}" for n in names(variant)], streams, strict=True)) | ({} if h0 is None else {"dh0": h0})
    return [f"{k}: {got[k].dtype} for an input of {x.dtype}" for k, x in leaves.items() if got[k].dtype != x.dtype]


def serve(device: str, poison: bool) -> None:
    import torch

    bench.use_checkout()
    torch.set_num_threads(1)
    bench.serve(lambda item: judge(Case.of(item), device, poison))


# ---------------------------------------------------------------------------------------------------------------------
# Which cases, in which order


def cost(case: Case) -> float:
    """How long a case's kernels take to compile, roughly: their tiles, and float32's products without matrix units."""
    side = max(16, 1 << (case.K - 1).bit_length())
    return (side + case.V) * (4.0 if case.dtype == "float32" else 1.0)


def _alternating(cases: list[Case]) -> list[Case]:
    """Dear and cheap by turns."""
    ranked = sorted(cases, key=lambda case: (cost(case), case.label))
    both = zip(ranked[::-1], ranked, strict=True)
    return list(dict.fromkeys(itertools.chain.from_iterable(both)))


def ordered(cases: list[Case], seed: int) -> list[Case]:
    """First a case of every variant and dtype, then one of all other kernels, then those that only run."""
    shuffled = sorted(cases, key=lambda case: case.label)
    random.Random(seed).shuffle(shuffled)
    shuffled.sort(key=lambda case: case.kind != "pairs")
    early: dict[tuple[str, str], Case] = {}
    fresh: dict[tuple[Any, ...], Case] = {}
    for case in shuffled:
        early.setdefault((case.variant, case.dtype), case)
        fresh.setdefault(case.compiles, case)
    first = _alternating(list(early.values()))
    second = _alternating(list(fresh.values()))
    return list(dict.fromkeys([*first, *second, *shuffled]))


def shard(cases: list[Case], index: int, count: int) -> list[Case]:
    """Cases that share kernels stay together."""
    groups = {key: i for i, key in enumerate(dict.fromkeys(case.compiles for case in cases))}
    return [case for case in cases if groups[case.compiles] % count == index]


def _dtypes_with(products: str) -> tuple[str, ...]:
    """The dtypes of inputs whose products are made so."""
    table = bench.generated("kda")._PRODUCTS  # the same in every file
    return tuple(d for d in DTYPES if table[dtypes_of(d)[0]] == products)


def _powers(lowest: int, highest: int) -> list[int]:
    """The powers of two that sizes from lowest to highest are padded to, largest first."""
    first, last = max(16, 1 << (lowest - 1).bit_length()), 1 << (highest - 1).bit_length()
    return [1 << n for n in range(last.bit_length() - 1, first.bit_length() - 2, -1)]


def _points(lowest: int, largest: int, kernels: dict[str, tuple[int, ...]]) -> Iterator[tuple[str, int, int]]:
    """(kind, K, V) that meet each tile of K and each tile of V that a row of the table can end in.

    A tile of K is the power of two from K up, or blocks of it; a tile of V the same, at most the table's columns a
    block. `config` are full tiles, `edges` sizes that leave the last tile of each axis partly empty.
    """
    blocks = {entry[bench.FIELDS.index("BV")] for entry in kernels.values()}
    widest = max(blocks)
    tiles = sorted({min(block, v) for block in blocks for v in _powers(16, widest)}, reverse=True)
    widths = [2 * tile if tile == widest else tile for tile in tiles]
    sides = _powers(lowest, largest)
    for i in range(max(len(sides), len(widths))):
        yield "config", sides[i % len(sides)], widths[i % len(widths)]
    yield "edges", largest - 3, widths[0] - 5
    yield "edges", lowest + 1, widths[-1] - 3


def config_cases(variant: str) -> list[Case]:
    """Each row of a module's table at the sizes of `_points`, by urgency: each tile in one dtype and the largest in
    every dtype that the row is for, then all tiles in those dtypes, then the edges."""
    gates = "mild" if variant != "delta" else "zero"
    found: dict[Case, tuple[int, int]] = {}
    below: dict[str, int] = {}
    for products, largest, _, kernels in bench.generated(variant)._CONFIGS:
        lowest = below.get(products, 15) + 1
        below[products] = largest
        for place, (kind, K, V) in enumerate(_points(lowest, largest, kernels)):
            for other, dtype in enumerate(_dtypes_with(products)):
                part = "edges" if kind == "edges" else "dtypes" if place and other else "config"
                rank = ("config", "dtypes", "edges").index(part)
                for T in CONFIG_LENGTHS:
                    found.setdefault(Case(part, variant, dtype, K, V, T, 1, "both", gates), (rank, place))
    return sorted(found, key=lambda case: (found[case], case.label))


LAG = 40
"""Cases between the two lengths of one configuration, so that the second finds the kernels compiled."""


def every_config(chosen: Sequence[str]) -> list[Case]:
    """Variants by turns, the urgent configurations of all before the others of any."""
    turns = itertools.zip_longest(*(config_cases(variant) for variant in chosen))
    cases = [case for turn in turns for case in turn if case]
    parts = ("config", "dtypes", "edges")
    short, *longer = CONFIG_LENGTHS
    first = [case for part in parts for case in cases if case.kind == part and short == case.T]
    again = [dataclasses.replace(case, T=T) for case in first for T in longer]
    ranked = [(i, case) for i, case in enumerate(first)] + [(i + LAG, case) for i, case in enumerate(again)]
    return [case for _, case in sorted(ranked, key=lambda pair: pair[0])]


def select(args: argparse.Namespace) -> list[Case]:
    bench.use_checkout()
    cases = every_config(VARIANTS) if args.configs else ordered(load(), args.seed)
    if args.only:
        cases = [case for case in cases if re.search(args.only, case.label)]
    if args.skip:
        done = {row["label"] for path in args.skip for row in rows_of(Path(path)) if not row["failures"]}
        cases = [case for case in cases if case.label not in done]
    if args.shard:
        index, _, count = args.shard.partition("/")
        cases = shard(cases, int(index), int(count))
    return cases[: args.first] if args.first else cases


def rows_of(path: Path) -> list[Json]:
    return [json.loads(line) for line in path.read_text().splitlines() if line.strip()]


# ---------------------------------------------------------------------------------------------------------------------
# The summary


def kind_of(key: str, case: Json) -> str:
    """The column of a tensor; gate gradients at strong decay are nearly nothing, and judged so, hence stand apart."""
    from oracles import GATES

    if key in ("o", "ht"):
        return "outputs"
    if key[1:] not in GATES:
        return "gradients"
    return "gates, strong" if case["gates"] in STRONG else "gates"


COLUMNS = ("outputs", "gradients", "gates", "gates, strong")


def worst_table(rows: Sequence[Json]) -> str:
    """Worst rr by variant and kind of tensor, float32 and the 16-bit dtypes apart, of the cases that passed."""
    worst: dict[tuple[str, str], dict[str, float]] = defaultdict(lambda: defaultdict(float))
    counts: dict[tuple[str, str], list[int]] = defaultdict(lambda: [0, 0])
    for row in rows:
        case = row["case"]
        group = (case["variant"], "float32" if case["dtype"] == "float32" else "16 bit")
        counts[group][0] += 1
        counts[group][1] += bool(row["failures"])
        if row["failures"]:
            continue
        for key, value in row["rr"].items():
            column = kind_of(key, case)
            worst[group][column] = max(worst[group][column], value or 0.0)
    order = sorted(counts, key=lambda g: (VARIANTS.index(g[0]), g[1]))
    lines = [(g[0], g[1], *counts[g], *(worst[g].get(c, 0.0) for c in COLUMNS)) for g in order]
    return bench.table(lines, ("variant", "dtype", "cases", "failed", *COLUMNS))


def counted(rows: Sequence[Json], factor: str) -> str:
    """How many of the rows there are for each value of a factor."""
    counts = Counter(row["case"][factor] for row in rows)
    return ", ".join(f"{value} {count}" for value, count in counts.most_common())


def summary(rows: Sequence[Json], not_run: int, seconds: float, about: Json) -> str:
    failed = [row for row in rows if row["failures"]]
    lines = [", ".join(f"{key} {value}" for key, value in about.items()), "", "worst rr of the cases that passed:", ""]
    lines += [worst_table(rows), ""]
    lines.append(f"{len(rows)} cases run, {len(failed)} failed, {not_run} not run, {seconds:.0f} s")
    if failed:
        lines += [f"  by {factor}: {counted(failed, factor)}" for factor in ("gates", "T", "K", "V", "group", "states")]
    for row in failed[:SHOWN]:
        more = f" (and {len(row['failures']) - 1} more)" if len(row["failures"]) > 1 else ""
        lines.append(f"  {row['label']}  {row['failures'][0][:200]}{more}")
    if len(failed) > SHOWN:
        lines.append(f"  and {len(failed) - SHOWN} more cases")
    return "\n".join(lines)


# ---------------------------------------------------------------------------------------------------------------------
# The run


def run(cases: Sequence[Case], args: argparse.Namespace, until: float) -> tuple[list[Json], int]:
    """The rows, written as they come, and how many cases were not begun."""
    command = [sys.executable, __file__, "--worker", "--device", args.device] + ["--no-poison"] * args.no_poison
    rows: list[Json] = []
    start = time.monotonic()
    with (args.out / f"{args.name}.jsonl").open("w") as file:

        def note(item: Json, answer: Json) -> None:
            case = Case.of(item)
            row = answer.get("row") or {"failures": [answer["error"]], "rr": {}, "seconds": {}}
            rows.append({"case": item, "label": case.label, **row})
            print(json.dumps(rows[-1]), file=file, flush=True)
            if row["failures"] or len(rows) % 50 == 0:
                print(f"{time.monotonic() - start:5.0f} s {len(rows)}/{len(cases)} {case.label} {row['failures'][:1]}")

        left = bench.run_pool(
            command,
            [dataclasses.asdict(case) for case in cases],
            args.workers,
            note,
            until=until,
            item_seconds=args.case_seconds,
            grace=args.grace,
            environment={"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"},
        )
    return rows, len(left)


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, help="folder for the rows and the summary")
    parser.add_argument("--name", help="name of the files there, by default check or configs")
    parser.add_argument("--configs", action="store_true", help="every configuration of the tables")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--workers", type=int, default=min(14, os.cpu_count() or 1))
    parser.add_argument("--budget-seconds", type=float, default=math.inf, help="begin no case after this long")
    parser.add_argument("--grace", type=float, default=45.0, help="seconds for cases under way at its end")
    parser.add_argument("--case-seconds", type=float, default=300.0, help="a case that takes longer is a failure")
    parser.add_argument("--shard", metavar="I/N", help="the I-th of N parts, counted from 0")
    parser.add_argument("--only", metavar="REGEX", help="cases whose label matches")
    parser.add_argument("--skip", nargs="*", metavar="JSONL", help="leave out cases that passed in earlier runs")
    parser.add_argument("--first", type=int, metavar="N", help="the first N cases")
    parser.add_argument("--seed", type=int, default=SEED, help="of the order")
    parser.add_argument("--no-poison", action="store_true", help="leave new memory as it is")
    parser.add_argument("--list", action="store_true", help="print the labels and stop")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.out is None and not (args.list or args.worker):
        parser.error("--out is needed")
    args.name = args.name or ("configs" if args.configs else "check")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = arguments(argv)
    if args.worker:
        serve(args.device, not args.no_poison)
        return 0
    start = time.monotonic()
    cases = select(args)
    if args.list:
        print("\n".join(case.label for case in cases))
        return 0
    args.out.mkdir(parents=True, exist_ok=True)
    rows, not_run = run(cases, args, start + args.budget_seconds)
    programs = " ".join(bench.generated(v)._NAME for v in sorted({row["case"]["variant"] for row in rows}))
    about = bench.versions(args.device) | {"programs": programs}
    text = summary(rows, not_run, time.monotonic() - start, about)
    (args.out / f"{args.name}.txt").write_text(text + "\n")
    print(text)
    return 1 if any(row["failures"] for row in rows) else 2 if not_run else 0


if __name__ == "__main__":
    sys.exit(main())
