"""Times every kernel of one variant over a grid of configurations, each by itself and each checked.

    python benchmarks/tune.py --out $OUT --variant kda --shape 1,8192,64
    python benchmarks/tune.py --out $OUT --variant kda --kernels scan reverse --grid BV=32,64,128 warps=4,8 stages=2,3,4
    TRITON_INTERPRET=1 python benchmarks/tune.py --out DIR --device cpu --shape 1,40,1 --K 16 --V 16 --grid BV=16

A configuration is an entry of the module's table `_CONFIGS`, a number a field. All are compiled first, in processes
side by side; then one process holds the inputs of each kernel, taken from a run with the table as it is, and launches
the kernel with each configuration on them. Its outputs, filled with NaN before, must be those of the table's own
configuration up to rounding, and that one is held to the float64 recurrence. A crash costs the configuration at hand.
Prints the best five a kernel and the row that they add up to, and times the operator with it. Writes DIR/NAME.json.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import inspect
import itertools
import json
import os
import re
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import bench
from bench import Json, Launch
from covering import VARIANTS
from peers import TIMES, Shape, draw, measure, operator

GRID = {"BK": (32, 64, 128), "BV": (32, 64, 128), "warps": (4, 8), "stages": (1, 2, 3), "registers": (0,)}
SCAN_STAGES = (2, 3, 4)
SHORT = 130
"""Tokens of the runs that only compile, and of the one that is judged: two chunks and a tail."""

ROUNDING = {"float32": 1e-4}
LOW_PRECISION = 1e-2
BEST = 5

Entry = tuple[int, ...]


# ---------------------------------------------------------------------------------------------------------------------
# The table


def row_of(module: ModuleType, K: int, dtype: Any) -> int:
    """The row of the table that a key size and the dtype of the inputs choose."""
    made = module._PRODUCTS[dtype]
    return next(i for i, (products, largest, *_) in enumerate(module._CONFIGS) if products == made and largest >= K)


def fields(entry: Entry) -> tuple[str, ...]:
    return bench.FIELDS[: len(entry)]


@contextlib.contextmanager
def patched(module: ModuleType, row: int, entries: dict[str, Entry], chunk: int | None = None) -> Iterator[None]:
    """The module with some entries of one row of its table replaced."""
    original = module._CONFIGS
    products, largest, length, table = original[row]
    changed = (products, largest, chunk or length, table | entries)
    module._CONFIGS = (*original[:row], changed, *original[row + 1 :])
    try:
        yield
    finally:
        module._CONFIGS = original


def source_of(kernel: Any) -> str:
    """The body of a kernel, its signature left out."""
    text = inspect.getsource(getattr(kernel, "fn", kernel))
    return text.partition('"""')[2]


def matters(kernel: Any, entry: Entry) -> dict[str, bool]:
    """Which fields change a kernel: tiles that it uses, stages where it loops; a tile of 0 is not to be chosen."""
    body = source_of(kernel)
    used = {"stages": "for " in body, "warps": True, "registers": True}
    found = {}
    for name, value in zip(fields(entry), entry, strict=True):
        found[name] = used[name] if name in used else value > 0 and bool(re.search(rf"\b{name}\b", body))
    return found


def grid_of(kernel: Any, entry: Entry, given: dict[str, tuple[int, ...]]) -> list[Entry]:
    """The table's own entry, then the grid over the fields that matter to the kernel."""
    scan = "INITIAL" in kernel.arg_names
    default = GRID | {"stages": SCAN_STAGES if scan else GRID["stages"]}
    relevant = matters(kernel, entry)
    axes = []
    for name, value in zip(fields(entry), entry, strict=True):
        axes.append(given.get(name, default[name]) if relevant[name] else (value,))
    return list(dict.fromkeys([entry, *itertools.product(*axes)]))


# ---------------------------------------------------------------------------------------------------------------------
# In the worker processes


@dataclasses.dataclass
class Bench:
    """One variant at one shape, and the launches of a run with the table as it is."""

    module: ModuleType
    variant: str
    shape: Shape
    dtype: Any
    gate_dtype: Any
    device: str
    chunk: int | None
    launched: list[Launch] | None = None
    expected: tuple[str, list[Any]] | None = None
    drawn: dict[int, tuple[list[Any], Any]] = dataclasses.field(default_factory=dict)
    timed: dict[str, Json] = dataclasses.field(default_factory=dict)

    @classmethod
    def of(cls, setup: Json) -> Bench:
        import torch

        bench.use_checkout()
        dtype, gate_dtype = getattr(torch, setup["dtype"]), getattr(torch, setup["gates"])
        module, shape = bench.generated(setup["variant"]), Shape(**setup["shape"])
        return cls(module, setup["variant"], shape, dtype, gate_dtype, setup["device"], setup["chunk"])

    def patched(self, entries: dict[str, Entry]) -> contextlib.AbstractContextManager[None]:
        row = row_of(self.module, self.shape.K, self.dtype)
        return patched(self.module, row, entries, self.chunk)

    def launches(self, entries: dict[str, Entry], tokens: int, launch: bool) -> list[Launch]:
        if tokens not in self.drawn:
            shape = dataclasses.replace(self.shape, T=tokens)
            self.drawn[tokens] = draw(self.variant, shape, self.dtype, self.gate_dtype, self.device)
        streams, do = self.drawn[tokens]
        with self.patched(entries):
            return bench.launches(self.module, streams, do, self.shape.K**-0.5, launch=launch)

    def entries(self, kernel: str, entry: Sequence[int]) -> dict[str, Entry]:
        table = self.module._CONFIGS[row_of(self.module, self.shape.K, self.dtype)][-1]
        return {bench.table_key(kernel, list(table)): tuple(entry)}

    def compile(self, kernel: str, entry: Sequence[int]) -> Json:
        found = one(self.launches(self.entries(kernel, entry), min(SHORT, self.shape.T), launch=False), kernel)
        compiled = found.kernel.warmup(*found.args, grid=(1,), **found.options)
        compiled._init_handles()
        loaded = {"registers": getattr(compiled, "n_regs", None), "spills": getattr(compiled, "n_spills", None)}
        return loaded | {"shared": compiled.metadata.shared}

    def base(self) -> list[Launch]:
        if self.launched is None:
            self.launched = self.launches({}, self.shape.T, launch=True)
        return self.launched

    def want(self, kernel: str) -> list[Any]:
        """What the table's own configuration writes."""
        if self.expected is None or self.expected[0] != kernel:
            self.expected = None
            launch = one(self.base(), kernel)
            self.expected = kernel, written(launch)
        return self.expected[1]

    def time(self, kernel: str, entry: Sequence[int], rep: float) -> Json:
        """Milliseconds of one kernel with one configuration, and how far its outputs are from those expected."""
        base = one(self.base(), kernel)
        noted = one(self.launches(self.entries(kernel, entry), self.shape.T, launch=False), kernel)
        check_same_buffers(base, noted)
        launch = Launch(base.kernel, noted.programs, base.args, noted.options)
        key = f"{kernel} {noted.programs} {noted.options}"
        if key not in self.timed:
            self.timed[key] = self._time(launch, base, self.want(kernel), rep)
        return self.timed[key]

    def _time(self, launch: Launch, base: Launch, want: list[Any], rep: float) -> Json:
        try:
            far = [distance(x, y) for x, y in zip(written(launch), want, strict=True)]
            ms = bench.median_ms(launch, self.device, rep)
        finally:
            for x, y in zip(base.outputs(), want, strict=True):
                x.copy_(y)
        options = {key: launch.options[key] for key in bench.OPTIONS if key in launch.options}
        row = {"ms": round(ms, 4), "rr": max(x for x, _ in far), "most": max(x for _, x in far), "options": options}
        return row | {"programs": launch.programs, "bytes": base.bytes()}

    def judge(self, entries: dict[str, Entry]) -> list[str]:
        """What is wrong with the operator against float64, on short sequences."""
        import fastref
        import metrics
        from inputs import make

        shape = self.shape
        sizes = (shape.B, min(SHORT, shape.T), shape.H, shape.HV, shape.K, shape.V)
        law = {"gate_dtype": self.gate_dtype, "device": self.device, "state": False}
        streams, _, do, _ = make(self.variant, *sizes, self.dtype, **law)
        scale = shape.K**-0.5
        with self.patched(entries):
            run = operator(self.variant, "dplrgen") if self.device == "cuda" else self.interpreted()
            got = metrics.collect(run, self.variant, streams, None, do, None, scale, output_final_state=False)
        ref = fastref.reference(self.variant, streams, None, do, None, scale)
        del ref["ht"]
        return metrics.check(self.variant, got, ref, self.dtype, streams)

    def interpreted(self) -> Any:
        """The Triton implementation on the CPU, which the operator would not take."""
        import torch

        module = self.module

        class Interpreted(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, scale: float, *streams: Any) -> Any:
                o, _, *saved = module._forward_triton(*streams, None, None, None, scale, False, True)
                ctx.save_for_backward(*streams, *saved)
                ctx.scale, ctx.count = scale, len(streams)
                return o

            @staticmethod
            def backward(ctx: Any, *cotangents: Any) -> Any:
                streams, saved = ctx.saved_tensors[: ctx.count], ctx.saved_tensors[ctx.count :]
                needs = (1 << ctx.count) - 1
                grads = module._backward_triton(*cotangents, None, *streams, None, None, None, *saved, ctx.scale, needs)
                return (None, *grads[: ctx.count])

        return lambda *streams, scale, **_: (Interpreted.apply(scale, *streams), None)

    def whole(self, entries: dict[str, Entry], rep: float) -> Json:
        """Milliseconds and memory of the operator, and whether it is right."""
        failures = self.judge(entries)
        streams, do = draw(self.variant, self.shape, self.dtype, self.gate_dtype, self.device)
        with self.patched(entries):
            row = measure(operator(self.variant, "dplrgen"), streams, do, self.shape.K**-0.5, self.device, rep)
        return row | {"failures": failures}


def one(found: Sequence[Launch], kernel: str) -> Launch:
    return next(launch for launch in found if launch.name == kernel)


def check_same_buffers(base: Launch, noted: Launch) -> None:
    """A configuration whose buffers have other shapes cannot be launched on those of the base."""
    for (key, x), y in zip(base.named().items(), noted.args, strict=False):
        if hasattr(x, "shape") and x.shape != y.shape:
            raise ValueError(f"{key} has shape {list(y.shape)}, with the table's configuration {list(x.shape)}")


def written(launch: Launch) -> list[Any]:
    """Copies of what a launch writes, NaN where it writes nothing."""
    outputs = launch.outputs()
    for x in outputs:
        x.fill_(float("nan"))
    launch()
    return [x.clone() for x in outputs]


def distance(got: Any, want: Any) -> tuple[float, float]:
    """rms and maximum of the difference over rms of what is expected; infinite if other elements are written."""
    import torch

    if not torch.equal(got.isnan(), want.isnan()):
        return float("inf"), float("inf")
    error, size = (got.float() - want.float()).nan_to_num_(0.0), want.float().nan_to_num_(0.0)
    scale = size.square().mean().sqrt().clamp(min=1e-30)
    return (error.square().mean().sqrt() / scale).item(), (error.abs().max() / scale).item()


def serve() -> None:
    import torch

    torch.set_num_threads(1)
    state: list[Bench] = []

    def handle(item: Json) -> Json:
        if not state:
            state.append(Bench.of(item["setup"]))
        action, *rest = item["do"]
        result = getattr(state[0], action)(*rest)
        return result if isinstance(result, dict) else {"result": result}

    bench.serve(handle)


# ---------------------------------------------------------------------------------------------------------------------
# In the main process


def ask(args: argparse.Namespace, items: Sequence[Json], workers: int, seconds: float) -> list[tuple[Json, Json]]:
    """The answers to all items; those for which the time did not suffice are errors."""
    found: list[tuple[Json, Json]] = []
    command = [sys.executable, __file__, "--worker"]
    environment = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    until = time.monotonic() + seconds
    left = bench.run_pool(
        command,
        [{"setup": args.setup, **item} for item in items],
        workers,
        lambda item, answer: found.append((item, answer)),
        until=until,
        environment=environment,
    )
    return found + [(item, {"error": "not begun within the time given"}) for item in left]


def within(row: Json, dtype: str) -> bool:
    """Whether a kernel's outputs are the expected ones, up to rounding, as a whole and element by element."""
    return row["rr"] <= ROUNDING.get(dtype, LOW_PRECISION) and row["most"] <= 1.0


def tried(args: argparse.Namespace, own: dict[str, Entry], grid: Sequence[tuple[str, Entry]]) -> list[Json]:
    """A row a kernel and configuration: compiled, checked, timed, or why not."""
    rows: dict[tuple[str, Entry], Json] = {pair: {"kernel": pair[0], "entry": list(pair[1])} for pair in grid}

    def note(found: Sequence[tuple[Json, Json]]) -> None:
        for item, answer in found:
            _, kernel, entry = item["do"][:3]
            row = rows.get((kernel, tuple(entry)), {})
            row.update(answer.get("row", {}))
            if "error" in answer:
                row["error"] = answer["error"]

    if args.device == "cuda":
        # those of the table first, also of kernels that are not tuned: the run that gives the inputs needs them all
        items = [{"do": ["compile", *pair]} for pair in dict.fromkeys([*own.items(), *grid])]
        note(ask(args, items, args.workers, args.compile_seconds))
    good = [pair for pair in grid if "error" not in rows[pair]]
    note(ask(args, [{"do": ["time", *pair, args.rep]} for pair in good], 1, args.seconds))
    for row in rows.values():
        if "error" not in row and not within(row, args.dtype):
            row["error"] = f"wrong: rr {row['rr']:.1e}, at most {row['most']:.1e} rms, from the table's configuration"
    return list(rows.values())


def suggested(rows: Sequence[Json], table: dict[str, Entry]) -> dict[str, Entry]:
    """For each key of the table the entry with the least time over all kernels that share it."""
    best: dict[str, Entry] = {}
    for key in table:
        kernels: dict[str, dict[Entry, float]] = {}
        for row in rows:
            if bench.table_key(row["kernel"], list(table)) == key and "error" not in row:
                kernels.setdefault(row["kernel"], {})[tuple(row["entry"])] = row["ms"]
        if kernels:
            # a field that a kernel does not use has the table's value there, so entries are joined field by field
            best[key] = _least(kernels, table[key])
    return best


def _least(kernels: dict[str, dict[Entry, float]], own: Entry) -> Entry:
    axes = [sorted({entry[i] for times in kernels.values() for entry in times}) for i in range(len(own))]

    def total(entry: Entry) -> float:
        return sum(_time_of(times, entry, own) for times in kernels.values())

    return min(itertools.product(*axes), key=lambda entry: (total(entry), entry != own))


def _time_of(times: dict[Entry, float], entry: Entry, own: Entry) -> float:
    """The time of an entry; fields that were never varied for this kernel do not matter to it."""
    varied = [len({e[i] for e in times}) > 1 for i in range(len(own))]
    return times.get(tuple(x if v else o for x, v, o in zip(entry, varied, own, strict=True)), float("inf"))


COLUMNS = ("ms", "TB/s", "rr", "regs", "spills", "shared", "as run")


def _line(row: Json, own: Entry) -> list[object]:
    mark = " (the table's)" if tuple(row["entry"]) == own else ""
    rate = f"{row['bytes'] / row['ms'] / 1e9:.2f}"
    cells = [row.get(key, "-") for key in ("registers", "spills", "shared")]
    options = " ".join(f"{key.removeprefix('num_')} {value}" for key, value in row["options"].items())
    return [f"{tuple(row['entry'])}{mark}", f"{row['ms']:.4f}", rate, f"{row['rr']:.0e}", *cells, options]


def report(rows: Sequence[Json], table: dict[str, Entry]) -> str:
    """The best of each kernel beside the table's own, then what failed, by reason."""
    text = []
    for kernel in dict.fromkeys(row["kernel"] for row in rows):
        mine = [row for row in rows if row["kernel"] == kernel]
        good = sorted((row for row in mine if "error" not in row), key=lambda row: row["ms"])
        own = table[bench.table_key(kernel, list(table))]
        text.append(f"\n{kernel}: {len(good)} of {len(mine)} configurations")
        shown = [*good[:BEST], *(row for row in good[BEST:] if tuple(row["entry"]) == own)]
        text.append(bench.table([_line(row, own) for row in shown], (" ".join(fields(own)), *COLUMNS)))
        reasons = sorted({f"{tuple(row['entry'])} {row['error'][:160]}" for row in mine if "error" in row})
        text += [f"  no: {reason}" for reason in reasons[:8]]
    return "\n".join(text)


def grids(text: Sequence[str]) -> dict[str, tuple[int, ...]]:
    """`BV=32,64` as the values of a field."""
    found = {}
    for part in text:
        name, _, values = part.partition("=")
        if name not in bench.FIELDS or not values:
            raise SystemExit(f"--grid takes {', '.join(f'{f}=..' for f in bench.FIELDS)}, not {part!r}")
        found[name] = tuple(int(x) for x in values.split(","))
    return found


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, help="folder for the results")
    parser.add_argument("--name", help="name of the file there, by default tune-VARIANT")
    parser.add_argument("--variant", default="kda", choices=VARIANTS)
    parser.add_argument("--shape", default="1,8192,64", help="B,T,H or B,T,H,HV,K,V")
    parser.add_argument("--K", type=int, default=128)
    parser.add_argument("--V", type=int, default=128)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--gates", help="dtype of the gates, by default that of the rest")
    parser.add_argument("--chunk", type=int, help="another chunk length than the table's")
    parser.add_argument("--kernels", nargs="+", metavar="REGEX", help="only kernels whose name matches one")
    parser.add_argument(
        "--grid", nargs="+", default=[], metavar="FIELD=N,N", help="values of BK, BV, warps, stages, registers"
    )
    parser.add_argument("--workers", type=int, default=min(14, os.cpu_count() or 1), help="that compile")
    parser.add_argument("--compile-seconds", type=float, default=240.0)
    parser.add_argument("--seconds", type=float, default=180.0, help="for the timing")
    parser.add_argument("--rep", type=float, default=50.0, help="milliseconds a figure")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.worker:
        return args
    if args.out is None:
        parser.error("--out is needed")
    args.name = args.name or f"tune-{args.variant}"
    args.gates = args.gates or args.dtype
    args.shape = Shape.of(args.shape, args.K, args.V)
    args.setup = {key: getattr(args, key) for key in ("variant", "dtype", "gates", "device", "chunk")}
    args.setup["shape"] = dataclasses.asdict(args.shape)
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = arguments(argv)
    if args.worker:
        serve()
        return 0
    import torch

    args.out.mkdir(parents=True, exist_ok=True)
    module = bench.generated(args.variant)
    table = module._CONFIGS[row_of(module, args.shape.K, getattr(torch, args.dtype))][-1]
    own = {name: tuple(table[bench.table_key(name, list(table))]) for name in bench.kernels_of(module)}
    names = [name for name in own if not args.kernels or any(re.search(r, name) for r in args.kernels)]
    given = grids(args.grid)
    grid = [(name, entry) for name in names for entry in grid_of(getattr(module, name), own[name], given)]
    print(f"{args.variant} {args.shape} {args.dtype}: {len(grid)} configurations of {len(names)} kernels", flush=True)
    rows = tried(args, own, grid)
    text = report(rows, table)
    print(text, flush=True)
    best = suggested(rows, table)
    changed = {key: list(entry) for key, entry in best.items() if entry != tuple(table[key])}
    checks = ask(args, [{"do": ["whole", entries, 4 * args.rep]} for entries in ({}, changed)], 1, args.seconds)
    whole = dict(zip(("table", "suggested"), (answer for _, answer in checks), strict=True))
    lines = [f"suggested: {changed or 'the table as it is'}"]
    for name, answer in whole.items():
        row = answer.get("row", {})
        figures = ", ".join(f"{key} {row[key]}" for key in TIMES if key in row)
        lines.append(f"  {name}: {answer.get('error') or figures} {' | '.join(row.get('failures', []))}")
    print("\n" + "\n".join(lines))
    about = bench.versions(args.device) | args.setup | {"program": module._NAME}
    result = {"about": about, "rows": rows, "suggested": changed, "whole": whole}
    (args.out / f"{args.name}.json").write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
