"""Speed and memory of the generated operators beside flash-linear-attention's, in one process.

    python benchmarks/peers.py --out $OUT --warm                     KDA at 1,8192,64 with K = V = 128, bfloat16
    python benchmarks/peers.py --out $OUT --variants kda gdn dplr --shapes 1,8192,64 1,32768,8 8,2048,32
    python benchmarks/peers.py --out $OUT --only-dplrgen --variants kda gdn    the kernels of each, one by one

Milliseconds are medians of triton.testing.do_bench; `infer` is the forward under no_grad, `forward` saves for backward.
Peak memory is what one forward and backward takes beyond the inputs. rr is against the float64 recurrence, on short
sequences of the same heads. flash-linear-attention tunes itself at its first call: --warm compiles what it will try in
processes side by side, without timing anything, so that the tuning itself happens later and alone. Writes
DIR/peers.json as it goes.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import bench
from bench import Json
from covering import VARIANTS

OURS = "dplrgen"
AGREEMENT_TOKENS = 512
WARM_TOKENS = 1024
LOWEST_GATE = -4.9

Op = Callable[..., tuple[Any, Any]]


@dataclasses.dataclass(frozen=True)
class Shape:
    B: int
    T: int
    H: int
    HV: int
    K: int
    V: int

    @classmethod
    def of(cls, text: str, K: int, V: int) -> Shape:
        """`B,T,H`, or with more of HV, K, V."""
        numbers = [int(x) for x in text.split(",")]
        B, T, H = numbers[:3]
        rest = [*numbers[3:], *(H, K, V)[len(numbers) - 3 :]]
        return cls(B, T, H, *rest)

    def __str__(self) -> str:
        heads = str(self.H) if self.H == self.HV else f"{self.H}/{self.HV}"
        return f"{self.B},{self.T},{heads},{self.K},{self.V}"


# ---------------------------------------------------------------------------------------------------------------------
# The operators: each takes the streams of a variant in its order and scale, initial_state, output_final_state


def _kda(**flags: Any) -> Op:
    from fla.ops.kda import chunk_kda

    return lambda q, k, v, g, beta, **rest: chunk_kda(q, k, v, g, beta, **flags, **rest)


def _gdn() -> Op:
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    return lambda q, k, v, g, beta, **rest: chunk_gated_delta_rule(q, k, v, g, beta, **rest)


def _gdn2(**flags: Any) -> Op:
    from fla.ops.gdn2 import chunk_gdn2

    return lambda q, k, v, e, w, g, **rest: chunk_gdn2(q, k, v, g=g, b=e, w=w, **flags, **rest)


def _dplr(**flags: Any) -> Op:
    """Its own a and b, which are those of `rwkv7`: h = Diag(alpha) h + b (a^T h) + k v^T."""
    from fla.ops.generalized_delta_rule import chunk_dplr_delta_rule

    return lambda q, k, v, a, b, g, **rest: chunk_dplr_delta_rule(q, k, v, a, b, gk=g, **flags, **rest)


def _rwkv7(**flags: Any) -> Op:
    from fla.ops.rwkv7 import chunk_rwkv7

    return lambda q, k, v, a, b, g, **rest: chunk_rwkv7(q, g, k, v, a, b, **flags, **rest)


def _comba() -> Op:
    from fla.ops.comba import chunk_comba

    return lambda q, k, v, p, g, beta, **rest: chunk_comba(q, k, v, p, g, beta, **rest)


def _gla() -> Op:
    from fla.ops.gla import chunk_gla

    return lambda q, k, v, g, **rest: chunk_gla(q, k, v, g, **rest)


def _simple_gla() -> Op:
    from fla.ops.simple_gla import chunk_simple_gla

    return lambda q, k, v, g, **rest: chunk_simple_gla(q, k, v, g=g, **rest)


def _delta() -> Op:
    from fla.ops.delta_rule import chunk_delta_rule

    return lambda q, k, v, beta, **rest: chunk_delta_rule(q, k, v, beta, **rest)


BOUNDED = {"safe_gate": True, "lower_bound": -5.0}
CHUNK_64 = {"safe_gate": True, "chunk_size": 64}

PEERS: dict[str, dict[str, Callable[[], Op]]] = {
    "kda": {"fla": _kda, "fla safe_gate": lambda: _kda(**BOUNDED)},
    "gdn": {"fla": _gdn},
    "gdn2": {"fla": _gdn2, "fla safe_gate": lambda: _gdn2(**BOUNDED)},
    "dplr": {"fla": _dplr, "fla safe_gate, chunk 64": lambda: _dplr(**CHUNK_64)},
    "rwkv7": {"fla": _rwkv7, "fla safe_gate, chunk 64": lambda: _rwkv7(**CHUNK_64)},
    "comba": {"fla": _comba},
    "gla": {"fla": _gla},
    "simple_gla": {"fla": _simple_gla},
    "delta": {"fla": _delta},
}

MEANT_AS = {("dplr", "fla"): "rwkv7", ("dplr", "fla safe_gate, chunk 64"): "rwkv7"}
"""Whose streams a peer's are, where that is not the variant that it stands beside."""


def implementations(variant: str, with_fla: bool) -> list[str]:
    return [OURS, *(PEERS.get(variant, {}) if with_fla else {})]


def operator(variant: str, name: str) -> Op:
    if name == OURS:
        op: Op = getattr(bench.generated(variant), variant)
        return op
    return PEERS[variant][name]()


def streams_of(variant: str, name: str) -> str:
    return MEANT_AS.get((variant, name), variant)


# ---------------------------------------------------------------------------------------------------------------------
# Inputs, drawn where they are used


ERASE = {"rwkv7": ("a", -0.5), "dplr": ("b", 0.5), "dplr_absorbed": ("d", 0.5)}
"""The stream that erases, and its length: below 1, or the state would grow."""


def draw(variant: str, shape: Shape, dtype: Any, gate_dtype: Any, device: str) -> tuple[list[Any], Any]:
    """Streams that require grad, by the law of tests/inputs.py at mild decay, and the cotangent of o."""
    import torch
    import torch.nn.functional as F
    from oracles import GATES, SIGNATURES

    generator = torch.Generator(device).manual_seed(0)
    size = dataclasses.asdict(shape)

    def tensor(name: str, symbols: str) -> Any:
        sizes = [size[s] for s in symbols.split()]
        as_dtype = gate_dtype if name in GATES else dtype
        if name in ("beta", "eta", "e", "w"):
            return torch.rand(sizes, generator=generator, device=device).to(as_dtype)
        x = torch.randn(sizes, generator=generator, device=device)
        if name == "g":
            return F.logsigmoid(x).clamp(min=LOWEST_GATE).to(as_dtype)
        return x.to(as_dtype) if name == "v" else F.normalize(x, dim=-1).to(as_dtype)

    drawn = {name: tensor(name, symbols) for name, symbols in SIGNATURES[variant]}
    if variant in ERASE:
        name, factor = ERASE[variant]
        drawn[name] = factor * drawn[name]
    do = torch.randn_like(drawn["v"])
    return [x.requires_grad_() for x in drawn.values()], do


# ---------------------------------------------------------------------------------------------------------------------
# One operator


def steps(op: Op, streams: Sequence[Any], do: Any, scale: float) -> dict[str, Callable[[], object]]:
    """What is timed."""
    import torch

    def forward() -> Any:
        return op(*streams, scale=scale, initial_state=None, output_final_state=False)[0]

    def infer() -> Any:
        with torch.no_grad():
            return forward()

    def both() -> Any:
        return torch.autograd.grad(forward(), streams, do)

    return {"infer": infer, "forward": forward, "forward+backward": both}


def peak_mib(run: Callable[[], object], device: str) -> float | None:
    """Memory beyond what there was before, at most, over one call."""
    if device != "cuda":
        return None
    import torch

    run()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def guarded(run: Callable[[], Any]) -> tuple[Any, str | None]:
    """The result, or what went wrong in a line."""
    try:
        return run(), None
    except Exception as error:
        return None, bench.describe(error)


def measure(op: Op, streams: Sequence[Any], do: Any, scale: float, device: str, rep: float) -> Json:
    """Milliseconds by step and peak memory; a step that fails leaves its error."""
    row: Json = {}
    timed = steps(op, streams, do, scale)
    for name, run in timed.items():
        value, error = guarded(lambda run=run: bench.median_ms(run, device, rep))
        row[name] = error if error else round(value, 4)
    value, error = guarded(lambda: peak_mib(timed["forward+backward"], device))
    row["peak MiB"] = error if error else value and round(value, 1)
    return row


def agreement(variant: str, name: str, shape: Shape, dtype: Any, gate_dtype: Any, device: str) -> Json:
    """rr of outputs and gradients against float64, on short sequences."""
    import fastref
    import metrics
    from inputs import make

    meant = streams_of(variant, name)
    sizes = (shape.B, min(shape.T, AGREEMENT_TOKENS), shape.H, shape.HV, shape.K, shape.V)
    streams, _, do, _ = make(meant, *sizes, dtype, gate_dtype=gate_dtype, seed=1, state=False, device=device)
    scale = shape.K**-0.5
    got = metrics.collect(operator(variant, name), meant, streams, None, do, None, scale, output_final_state=False)
    ref = fastref.reference(meant, streams, None, do, None, scale)
    del ref["ht"]
    return {key: float(f"{value:.2e}") for key, value in metrics.worst(got, ref).items()}


def profiled(run: Callable[[], object], device: str, calls: int = 5) -> dict[str, float]:
    """Milliseconds a call by kernel, as the profiler sees them."""
    if device != "cuda":
        return {}
    import torch
    from torch.profiler import ProfilerActivity, profile

    run()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(calls):
            run()
        torch.cuda.synchronize()
    times = {
        event.key: getattr(event, "self_device_time_total", None) or getattr(event, "self_cuda_time_total", 0.0)
        for event in profiler.key_averages()
    }
    ranked = sorted(times.items(), key=lambda pair: -pair[1])
    return {name[:80]: round(total / calls / 1e3, 4) for name, total in ranked if total > 0}


def kernel_times(variant: str, shape: Shape, dtype: Any, gate_dtype: Any, device: str, rep: float) -> list[Json]:
    """Each kernel of the generated module by itself: milliseconds, bytes that it is given, options."""
    streams, do = draw(variant, shape, dtype, gate_dtype, device)
    found = bench.launches(bench.generated(variant), streams, do, shape.K**-0.5, launch=True)
    rows = []
    for launch in found:
        ms, size = bench.median_ms(launch, device, rep), launch.bytes()
        row = {"kernel": launch.name, "ms": round(ms, 4), "MiB": size >> 20, "TB/s": round(size / ms / 1e9, 2)}
        rows.append(row | {key: launch.options[key] for key in ("C", *bench.OPTIONS) if key in launch.options})
    return rows


# ---------------------------------------------------------------------------------------------------------------------
# Warming: what will be tried is compiled by many processes, and nothing is timed


@contextlib.contextmanager
def only_compiling(part: int, parts: int) -> Iterator[None]:
    """Autotuners run every parts-th of their configurations once, from the part-th on, and take one of those."""
    from triton.compiler.errors import CompileTimeAssertionFailure
    from triton.runtime.autotuner import Autotuner
    from triton.runtime.errors import OutOfResources, PTXASError

    original, seen = Autotuner._bench, []

    def compile_only(self: Any, *args: Any, config: Any, **meta: Any) -> list[float]:
        seen.append(self)
        place, count = self.configs.index(config), len(self.configs)
        if place % parts != part and not (count < parts and place == part % count):
            return [float("inf")] * 3
        if config.pre_hook is not None:
            config.pre_hook({**self.nargs, **meta, **config.all_kwargs()})
        try:
            self.fn.run(*args, **{**meta, **config.all_kwargs()})
        except (OutOfResources, CompileTimeAssertionFailure, PTXASError):
            return [float("inf")] * 3
        return [1.0] * 3

    Autotuner._bench = compile_only
    try:
        yield
    finally:
        Autotuner._bench = original
        for tuner in seen:
            tuner.cache.clear()


def warm(item: Json) -> Json:
    """One item of `warm_items`: a kernel of ours, or a part of a peer's configurations."""
    import torch

    start = time.monotonic()
    shape = Shape(**item["shape"])
    shape = dataclasses.replace(shape, T=min(shape.T, WARM_TOKENS))
    variant, name, device = item["variant"], item["name"], item["device"]
    dtype, gate_dtype = getattr(torch, item["dtype"]), getattr(torch, item["gates"])
    streams, do = draw(streams_of(variant, name), shape, dtype, gate_dtype, device)
    scale = shape.K**-0.5
    if name == OURS:
        module = bench.generated(variant)
        trained = bench.launches(module, streams, do, scale, launch=False)
        found = trained + bench.launches(module, streams, do, scale, launch=False, save=False)
        if item["part"] < len(found):
            launch = found[item["part"]]
            launch.kernel.warmup(*launch.args, grid=(1,), **launch.options)
    else:
        with only_compiling(item["part"], item["parts"]):
            timed = steps(operator(variant, name), streams, do, scale)
            timed["infer"]()
            timed["forward+backward"]()
    return {"seconds": round(time.monotonic() - start, 1)}


def warm_items(args: argparse.Namespace, shapes: Sequence[Shape]) -> list[Json]:
    """Peers first, since theirs are the most; one shape, where only the number of tokens differs."""
    items = []
    for variant in args.variants:
        for shape in shapes:
            for name in implementations(variant, not args.no_fla)[::-1]:
                parts = len(bench.kernels_of(bench.generated(variant))) + 2 if name == OURS else args.workers
                common = {"variant": variant, "name": name, "shape": dataclasses.asdict(shape), "parts": parts}
                common |= {"device": args.device, "dtype": args.dtype, "gates": args.gates or args.dtype}
                items += [common | {"part": part} for part in range(parts)]
    return items


def run_warm(args: argparse.Namespace, shapes: Sequence[Shape]) -> Json:
    start, errors = time.monotonic(), []

    def note(item: Json, answer: Json) -> None:
        if "error" in answer:
            errors.append(f"{item['variant']} {item['name']} part {item['part']}: {answer['error']}")
            print("warm:", errors[-1][:400])

    # what these processes choose must not be kept: they compare nothing
    environment = {"FLA_CACHE_RESULTS": "0", "TRITON_CACHE_AUTOTUNING": "0", "OMP_NUM_THREADS": "1"}
    items = warm_items(args, shapes)
    until = start + args.warm_seconds
    left = bench.run_pool(
        [sys.executable, __file__, "--worker"], items, args.workers, note, until=until, environment=environment
    )
    seconds = round(time.monotonic() - start, 1)
    print(f"warm: {len(items) - len(left)} of {len(items)} items, {len(errors)} errors, {seconds} s")
    return {"seconds": seconds, "items": len(items), "left": len(left), "errors": errors}


# ---------------------------------------------------------------------------------------------------------------------
# The measurement


def _middle(values: Sequence[Any]) -> Any:
    numbers = [x for x in values if isinstance(x, (int, float))]
    return round(statistics.median(numbers), 4) if len(numbers) == len(values) else next(iter(values), None)


def compare(variant: str, shape: Shape, args: argparse.Namespace, dtypes: tuple[Any, Any]) -> list[Json]:
    """A row an implementation; rounds go through all of them in turn, and the medians of the rounds are reported."""
    names, rows = implementations(variant, not args.no_fla), []
    first: dict[str, Json] = {}
    for name in names:
        start = time.monotonic()
        op, error = guarded(lambda name=name: operator(variant, name))
        row: Json = {"variant": variant, "shape": str(shape), "name": name}
        if error is None:
            meant = streams_of(variant, name)
            streams, do = draw(meant, shape, *dtypes, args.device)
            row["inputs MiB"] = round(sum(x.numel() * x.element_size() for x in streams) / 2**20, 1)
            for run in steps(op, streams, do, shape.K**-0.5).values():
                guarded(run)
            first[name] = {"op": op, "rounds": []}
            del streams, do
            # after the first calls: a peer tunes itself at the sizes that are timed
            row["rr"], error = guarded(lambda name=name: agreement(variant, name, shape, *dtypes, args.device))
        row["error"] = error
        row["first calls s"] = round(time.monotonic() - start, 1)
        rows.append(row)
    for _ in range(args.rounds):
        for name, state in first.items():
            streams, do = draw(streams_of(variant, name), shape, *dtypes, args.device)
            state["rounds"].append(measure(state["op"], streams, do, shape.K**-0.5, args.device, args.rep))
            del streams, do
    for row in rows:
        rounds = first.get(row["name"], {}).get("rounds", [])
        row |= {key: _middle([r[key] for r in rounds]) for key in (rounds[0] if rounds else {})}
        row["rounds"] = rounds
        if rounds and args.kernels:
            streams, do = draw(streams_of(variant, row["name"]), shape, *dtypes, args.device)
            both = steps(first[row["name"]]["op"], streams, do, shape.K**-0.5)["forward+backward"]
            row["kernels"], row["kernels error"] = guarded(lambda both=both: profiled(both, args.device))
            del streams, do, both
    return rows


TIMES = ("infer", "forward", "forward+backward", "peak MiB")


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return "failed" if isinstance(value, str) else f"{value:.3f}" if value < 100 else f"{value:.0f}"


def report(rows: Sequence[Json]) -> str:
    """Times and memory, then rr, then what failed."""
    lines = [(f"{r['variant']} {r['shape']} {r['name']}", *(_cell(r.get(key)) for key in TIMES)) for r in rows]
    text = [bench.table(lines, ("variant B,T,H,K,V", *TIMES)), ""]
    for row in rows:
        if row.get("rr"):
            figures = " ".join(f"{key} {value:.1e}" for key, value in row["rr"].items())
            text.append(f"rr  {row['variant']} {row['name']}: {figures}")
    for row in rows:
        problems = {row.get("error"), *(row.get(key) for key in TIMES if isinstance(row.get(key), str))} - {None}
        text += [f"failed  {row['variant']} {row['name']}: {problem[:400]}" for problem in sorted(problems)]
    return "\n".join(text)


def ours_alone(args: argparse.Namespace, shapes: Sequence[Shape], dtypes: tuple[Any, Any]) -> list[Json]:
    """The kernels of each variant one by one, and the whole beside their sum."""
    rows = []
    for variant in args.variants:
        for shape in shapes:
            row: Json = {"variant": variant, "shape": str(shape), "name": OURS}
            row["kernels"], row["error"] = guarded(
                lambda variant=variant, shape=shape: kernel_times(variant, shape, *dtypes, args.device, args.rep)
            )
            rows.append(row)
            if row["error"]:
                print(f"{variant} {shape}: {row['error'][:600]}")
                continue
            streams, do = draw(variant, shape, *dtypes, args.device)
            row |= measure(operator(variant, OURS), streams, do, shape.K**-0.5, args.device, args.rep)
            del streams, do
            head = ("kernel", "ms", "MiB", "TB/s", "C", *bench.OPTIONS)
            total = sum(k["ms"] for k in row["kernels"])
            print(f"\n{variant} {shape}: " + ", ".join(f"{key} {_cell(row[key])}" for key in TIMES))
            print(bench.table([[str(k.get(h, "-")) for h in head] for k in row["kernels"]], head))
            print(f"sum of kernels {total:.3f} ms", flush=True)
    return rows


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, help="folder for peers.json")
    parser.add_argument("--name", default="peers", help="name of the file there")
    parser.add_argument("--variants", nargs="+", default=["kda"], choices=VARIANTS)
    parser.add_argument("--shapes", nargs="+", default=["1,8192,64"], help="B,T,H or B,T,H,HV,K,V")
    parser.add_argument("--K", type=int, default=128)
    parser.add_argument("--V", type=int, default=128)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--gates", help="dtype of the gates, by default that of the rest")
    parser.add_argument("--only-dplrgen", action="store_true", help="our kernels one by one, nothing else")
    parser.add_argument("--no-fla", action="store_true", help="leave flash-linear-attention out")
    parser.add_argument("--warm", action="store_true", help="compile first, in processes side by side")
    parser.add_argument("--warm-seconds", type=float, default=300.0)
    parser.add_argument("--workers", type=int, default=min(14, os.cpu_count() or 1), help="of --warm")
    parser.add_argument("--kernels", action="store_true", help="also profile every implementation's kernels")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--rep", type=float, default=200.0, help="milliseconds a figure")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.out is None and not args.worker:
        parser.error("--out is needed")
    args.no_fla = args.no_fla or args.only_dplrgen
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = arguments(argv)
    bench.use_checkout()
    if args.worker:
        bench.serve(warm)
        return 0
    import torch

    args.out.mkdir(parents=True, exist_ok=True)
    shapes = [Shape.of(text, args.K, args.V) for text in args.shapes]
    dtypes = getattr(torch, args.dtype), getattr(torch, args.gates or args.dtype)
    result: Json = {"about": bench.versions(args.device), "dtype": args.dtype, "gates": args.gates or args.dtype}
    if args.warm:
        result["warm"] = run_warm(args, shapes)

    def write(rows: Sequence[Json]) -> None:
        (args.out / f"{args.name}.json").write_text(json.dumps(result | {"rows": rows}, indent=1) + "\n")

    rows: list[Json] = []
    if args.only_dplrgen:
        rows = ours_alone(args, shapes, dtypes)
        write(rows)
        return 0
    for variant in args.variants:
        for shape in shapes:
            rows += compare(variant, shape, args, dtypes)
            write(rows)
            print(f"{time.strftime('%H:%M:%S')} {variant} {shape} done", flush=True)
    text = report(rows)
    (args.out / f"{args.name}.txt").write_text(text + "\n")
    print(f"\n{', '.join(f'{k} {v}' for k, v in result['about'].items())}\n\n{text}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
