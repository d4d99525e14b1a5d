"""Compile every kernel of the generated operators ahead of time, for GPUs that need not be here.

    python benchmarks/aot.py --variants kda --targets sm_90,gfx942      print registers, stack, shared memory
    python benchmarks/aot.py --write                                    and keep the table (what `make aot` does)

An operator's two Triton functions run on small CPU tensors with their launches noted instead of made, as in training:
everything saved, an initial state, a final state, every gradient. Each noted launch is then compiled by the call that a
GPU would get, under a driver that answers for another machine, so signature, specialisation and options are those of
run time by construction.

The table stands in benchmarks/results/aot.json, by operator name and digest, and in benchmarks/results/aot.md to read.
Exit status 1: something does not compile, or takes more shared or tensor memory than its target has.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import importlib
import io
import json
import multiprocessing
import os
import pkgutil
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

import dplrgen.generated

# Triton 3.9 warns where this is unset, since the default turns from 1 to 0 in 3.10. It decides whether a product and a
# sum become one instruction, so a table is only good for one of the two: this one, which is also what 3.9 does unasked.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

RESULTS = Path(__file__).parent / "results"
TABLE = RESULTS / "aot.json"
PAGE = RESULTS / "aot.md"

#: Streams and gates; `mixed` is the usual case of a bfloat16 model that keeps its gates in float32.
DTYPES: dict[str, tuple[torch.dtype, torch.dtype]] = {
    "bfloat16": (torch.bfloat16, torch.bfloat16),
    "float16": (torch.float16, torch.float16),
    "float32": (torch.float32, torch.float32),
    "mixed": (torch.bfloat16, torch.float32),
}

KIB = 1024


@dataclass(frozen=True)
class Target:
    """A GPU to compile for; a block may have `shared` bytes of shared memory and `tensor` columns of tensor memory."""

    name: str
    gpu: GPUTarget
    shared: int
    tensor: int = 0


TARGETS = {
    t.name: t
    for t in (
        Target("sm_80", GPUTarget("cuda", 80, 32), 163 * KIB),
        Target("sm_90", GPUTarget("cuda", 90, 32), 227 * KIB),
        Target("sm_100", GPUTarget("cuda", 100, 32), 227 * KIB, 512),
        Target("gfx942", GPUTarget("hip", "gfx942", 64), 64 * KIB),
    )
}

#: Matrix instructions, as the assembly text spells them.
MATRIX = {
    "wgmma": re.compile(r"\bwgmma\.mma_async\b"),
    "mma.sync": re.compile(r"\bmma\.sync\b"),
    "tcgen05": re.compile(r"\btcgen05\.mma\b"),
    "v_mfma": re.compile(r"\bv_mfma_"),
}


@dataclass(frozen=True)
class Case:
    """What is compiled together: one operator at K = V = size."""

    variant: str
    target: str
    dtype: str
    size: int

    def __str__(self) -> str:
        return f"{self.variant} {self.target} {self.dtype} K=V={self.size}"


@dataclass(frozen=True)
class Launch:
    """A kernel and what it was to be launched with."""

    label: str
    kernel: Any
    programs: int
    args: tuple[Any, ...]
    options: Mapping[str, Any]


@dataclass(frozen=True)
class Row:
    """One compiled kernel: registers a thread (vector registers on AMD), stack bytes a thread, shared bytes a block.

    `tensor` is columns of tensor memory a block, `products` the tile products of the program handed to the compiler,
    `matrix` the instructions they became.
    """

    kernel: str
    target: str
    dtype: str
    size: int
    registers: int
    stack: int
    shared: int
    tensor: int
    products: int
    matrix: Mapping[str, int]


@dataclass(frozen=True)
class Outcome:
    """A row or what went wrong, and how long it took."""

    case: Case
    kernel: str
    seconds: float
    row: Row | None = None
    error: str = ""


@dataclass(frozen=True)
class Table:
    """What is kept: rows by operator name and digest, and the compilers they come from."""

    versions: Mapping[str, str] = field(default_factory=dict)
    operators: Mapping[str, tuple[Row, ...]] = field(default_factory=dict)


# ---------------------------------------------------------------------------------------------------------------------
# Launches, noted


def variants() -> list[str]:
    return sorted(m.name for m in pkgutil.iter_modules(dplrgen.generated.__path__) if not m.name.startswith("_"))


def load(variant: str) -> ModuleType:
    return importlib.import_module(f"dplrgen.generated.{variant}")


def launches(case: Case) -> list[Launch]:
    """Every launch of a training step, forward then backward, in order, and of a token step."""
    module = load(case.variant)
    noted: list[Launch] = []
    seen: dict[str, int] = {}

    def note(kernel: Any, programs: int, *args: Any, **options: Any) -> None:
        name = kernel.__name__.lstrip("_")
        seen[name] = seen.get(name, 0) + 1
        label = name if seen[name] == 1 else f"{name}#{seen[name]}"
        noted.append(Launch(label, kernel, programs, args, options))

    with mock.patch.object(module, "_launch", note), _as_on(module, TARGETS[case.target]):
        _train(module, case)
    return noted


def _train(module: ModuleType, case: Case) -> None:
    B, T, H = 1, 256, 2  # H and HV neither 1 nor a multiple of 16: no specialisation
    dims = {"H": H, "HV": H, "K": case.size, "V": case.size}
    dtype, gates = DTYPES[case.dtype]
    streams = [
        torch.zeros(B, T, dims[heads], *(dims[a] for a in axes), dtype=gates if role == "gate" else dtype)
        for _, role, heads, axes in module._STREAMS
    ]
    state = torch.zeros(B, H, case.size, case.size)
    o, final, *saved = module._forward_triton(*streams, state, None, None, 0.125, True, True)
    everything = (1 << (len(streams) + 1)) - 1
    module._backward_triton(torch.zeros_like(o), final, *streams, state, None, None, *saved, 0.125, everything)
    pool = state.expand(3, -1, -1, -1)
    module._step_triton(*(x[0, :3] for x in streams), pool, pool, torch.arange(3), 0.125)


@contextmanager
def _as_on(module: ModuleType, target: Target) -> Iterator[None]:
    """The module chooses its settings as it would on the target: it sees a GPU, that GPU's memory, and its vendor."""
    choose = module._setting

    def setting(q: torch.Tensor, *rest: Any) -> Any:
        return choose(OnDevice(q), *rest)

    vendor = "0" if target.gpu.backend == "hip" else None
    with (
        mock.patch.object(module, "_setting", setting),
        mock.patch.object(module, "_shared_memory", return_value=target.shared),
        mock.patch.object(module, "_capability", return_value=(target.gpu.arch // 10, 0) if vendor is None else (9, 4)),
        mock.patch.object(torch.version, "hip", vendor),
    ):
        yield


@dataclass(frozen=True)
class OnDevice:
    """What settings read of a tensor, for a CPU tensor that stands for one of a GPU."""

    tensor: torch.Tensor
    is_cuda: bool = True
    device: torch.device = field(default=torch.device("cuda", 0))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tensor, name)


# ---------------------------------------------------------------------------------------------------------------------
# Launches, compiled


@dataclass(frozen=True)
class Elsewhere:
    """A Triton driver that answers for a machine that is not here; the device's name keeps targets apart."""

    target: Target

    def get_current_target(self) -> GPUTarget:
        return self.target.gpu

    def get_current_device(self) -> str:
        return self.target.name

    def get_current_stream(self, device: str) -> int:
        return 0


def compiled(launch: Launch, target: Target) -> Any:
    """The compiled kernel. Triton's cache is left out, so that what is compiled is what stands in the file.

    Where an assembler fails, Triton prints the whole program: that is dropped, the exception says enough.
    """
    with (
        tempfile.TemporaryDirectory() as scratch,
        redirect_stdout(io.StringIO()),
        triton.knobs.cache.scope(),
        mock.patch.object(driver, "_active", Elsewhere(target)),
    ):
        triton.knobs.cache.dir = scratch
        return launch.kernel.warmup(*launch.args, grid=(launch.programs,), **launch.options)


def measured(label: str, binary: Any, case: Case) -> Row:
    registers, stack = _amd_resources(binary) if "amdgcn" in binary.asm else _nvidia_resources(binary)
    text = binary.asm["amdgcn" if "amdgcn" in binary.asm else "ptx"]
    found = {name: len(pattern.findall(text)) for name, pattern in MATRIX.items()}
    return Row(
        kernel=label,
        target=case.target,
        dtype=case.dtype,
        size=case.size,
        registers=registers,
        stack=stack,
        shared=binary.metadata.shared,
        tensor=getattr(binary.metadata, "tmem_size", None) or 0,
        products=len(re.findall(r"\btt\.dot\b", binary.asm["ttir"])),
        matrix={name: count for name, count in found.items() if count},
    )


def _nvidia_resources(binary: Any) -> tuple[int, int]:
    """Registers and stack a thread, of the kernel itself."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary.asm["cubin"])
        file.flush()
        tool = triton.knobs.nvidia.cuobjdump.path
        text = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    usage = text.split(f"Function {binary.name}:", 1)[1]
    return _number(r"REG:(\d+)", usage), _number(r"STACK:(\d+)", usage)


def _amd_resources(binary: Any) -> tuple[int, int]:
    text = binary.asm["amdgcn"]
    return _number(r"\.vgpr_count:\s+(\d+)", text), _number(r"\.private_segment_fixed_size:\s+(\d+)", text)


def _number(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    if found is None:
        raise ValueError(f"no {pattern} in the compiler's output")
    return int(found[1])


def outcome(case: Case, index: int) -> Outcome:
    """Compile one launch of a case; an exception of the compiler is a result too."""
    launch = launches(case)[index]
    start = time.perf_counter()
    try:
        row = measured(launch.label, compiled(launch, TARGETS[case.target]), case)
    except Exception as error:  # whatever a compiler raises
        return Outcome(case, launch.label, time.perf_counter() - start, error=brief(error))
    return Outcome(case, launch.label, time.perf_counter() - start, row)


def brief(error: Exception) -> str:
    """The line that says most: an assembler's own complaint, else the first."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {next((x for x in lines if 'fatal' in x or 'error  ' in x), (*lines, '')[0])}"


def outcomes(cases: Sequence[Case], jobs: int) -> Iterator[Outcome]:
    """All of them, in order, as they come."""
    tasks = [(case, index) for case in cases for index in range(len(launches(case)))]
    if jobs == 1:
        yield from (outcome(*task) for task in tasks)
        return
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(jobs, mp_context=context) as pool:
        yield from pool.map(outcome, *zip(*tasks, strict=True))


# ---------------------------------------------------------------------------------------------------------------------
# The table


def fits(row: Row) -> bool:
    target = TARGETS[row.target]
    return row.shared <= target.shared and row.tensor <= target.tensor


def versions() -> dict[str, str]:
    tools = {"ptxas": triton.knobs.nvidia.ptxas, "ptxas from sm_90": triton.knobs.nvidia.ptxas_blackwell}
    return {"triton": triton.__version__, **{name: tool.version for name, tool in tools.items()}}


def merged(old: Table, new: Table, current: Iterable[str]) -> Table:
    """The new rows over the old ones, without operators that are gone or changed, or came from other compilers."""
    kept = old.operators if old.versions == new.versions else {}
    return Table(
        new.versions,
        {
            name: tuple({_key(r): r for r in (*kept.get(name, ()), *new.operators.get(name, ()))}.values())
            for name in sorted(current)
            if name in kept or name in new.operators
        },
    )


def _key(row: Row) -> tuple[str, str, int, str]:
    return row.target, row.dtype, row.size, row.kernel


def read(path: Path = TABLE) -> Table:
    if not path.exists():
        return Table()
    raw = json.loads(path.read_text())
    return Table(raw["versions"], {name: tuple(Row(**r) for r in rows) for name, rows in raw["operators"].items()})


def as_json(table: Table) -> str:
    """One row a line, so that a change reads as one."""
    blocks = [
        f"{json.dumps(name)}: [\n" + ",\n".join(json.dumps(asdict(r)) for r in rows) + "\n]"
        for name, rows in table.operators.items()
    ]
    versions_text = json.dumps(table.versions)
    return f'{{"versions": {versions_text},\n"operators": {{\n' + ",\n".join(blocks) + "\n}}\n"


def as_page(table: Table) -> str:
    """A Markdown table an operator: a line a kernel, dtype and size, a column a target."""
    lines = [
        "# Kernels compiled ahead of time",
        "",
        "Written by `python benchmarks/aot.py --write`. Each cell: registers, stack in bytes a thread (if any), shared",
        "memory in KiB and columns of tensor memory (if any) a block, matrix instructions in the text.",
        "",
        ", ".join(f"{name} {version}" for name, version in table.versions.items()),
    ]
    for name, rows in table.operators.items():
        targets = [t for t in TARGETS if any(r.target == t for r in rows)]
        cells = {_key(r): _cell(r) for r in rows}
        places = dict.fromkeys((r.dtype, r.size, r.kernel) for r in rows)
        lines += ["", f"## {name}", "", "| kernel | dtype | K = V | " + " | ".join(targets) + " |"]
        lines += ["| --- | --- | --- |" + " --- |" * len(targets)]
        for dtype, size, kernel in places:
            row = " | ".join(cells.get((t, dtype, size, kernel), "") for t in targets)
            lines.append(f"| {kernel} | {dtype} | {size} | {row} |")
    return "\n".join(lines) + "\n"


def _cell(row: Row) -> str:
    parts = [
        f"{row.registers}",
        f"stack {row.stack}" if row.stack else "",
        f"{row.shared / KIB:.0f}K",
        f"{row.tensor} columns" if row.tensor else "",
        _instructions(row),
    ]
    return ", ".join(p for p in parts if p)


def _instructions(row: Row) -> str:
    return " ".join(f"{count} {name}" for name, count in row.matrix.items())


def as_line(x: Outcome) -> str:
    case = x.case
    head = f"{case.variant:14s} {x.kernel:22s} {case.target:7s} {case.dtype:9s} {case.size:4d} {x.seconds:6.1f} s"
    if x.row is None:
        return f"{head}  FAILED {x.error}"
    row, target = x.row, TARGETS[case.target]
    over = "" if fits(row) else f"  OVER {target.shared // KIB} KiB, {target.tensor} columns"
    block = f"{row.shared / KIB:6.1f} KiB {row.tensor:3d} columns"
    memory = f"{row.registers:4d} registers {row.stack:6d} stack {block}"
    return f"{head} {memory}  {row.products:2d} products: {_instructions(row)}{over}"


# ---------------------------------------------------------------------------------------------------------------------
# Command line


def choices(what: str, known: Iterable[str]) -> Any:
    known = list(known)

    def parse(text: str) -> list[str]:
        chosen = text.split(",")
        unknown = [x for x in chosen if x not in known]
        if unknown:
            raise argparse.ArgumentTypeError(f"unknown {what} {unknown[0]!r}, expected some of {','.join(known)}")
        return chosen

    return parse


def parser() -> argparse.ArgumentParser:
    out = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    every = variants()
    out.add_argument("--variants", type=choices("variant", every), default=every)
    out.add_argument("--targets", type=choices("target", TARGETS), default=list(TARGETS))
    out.add_argument("--dtypes", type=choices("dtype", DTYPES), default=["bfloat16", "float32"])
    out.add_argument("--sizes", type=lambda text: [int(x) for x in text.split(",")], default=[64, 128])
    out.add_argument("--jobs", type=int, default=2)
    out.add_argument("--write", action="store_true", help="keep the table in benchmarks/results")
    return out


def main(argv: Sequence[str] | None = None) -> int:
    if triton.knobs.runtime.interpret:
        parser().error("TRITON_INTERPRET is set, so that kernels are interpreted and none is compiled")
    args = parser().parse_args(argv)
    cases = [
        Case(variant, target, dtype, size)
        for variant in args.variants
        for dtype in args.dtypes
        for size in args.sizes
        for target in args.targets
    ]
    done = []
    for x in outcomes(cases, args.jobs):
        print(as_line(x), flush=True)
        done.append(x)
    failed = [x for x in done if x.row is None]
    over = [x for x in done if x.row is not None and not fits(x.row)]
    print(f"{len(done)} kernels, {len(failed)} failed, {len(over)} over the memory of their target")
    if args.write and not failed:
        rows: dict[str, list[Row]] = {}
        for x in done:
            if x.row is not None:
                rows.setdefault(load(x.case.variant)._NAME, []).append(x.row)
        new = Table(versions(), {name: tuple(r) for name, r in rows.items()})
        table = merged(read(), new, (load(v)._NAME for v in variants()))
        RESULTS.mkdir(exist_ok=True)
        TABLE.write_text(as_json(table))
        PAGE.write_text(as_page(table))
        print(f"wrote {TABLE.name} and {PAGE.name}")
    return 1 if failed or over else 0


if __name__ == "__main__":
    sys.exit(main())
