"""What this machine has, which back ends work on it, and whether its set of versions has been tried.

A back end is tried by running a small operator forward and backward against the float64 token loop. torch and triton
may be missing: that is one of the findings.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass

import dplrgen

__all__ = ["KNOWN_BAD", "TESTED", "Finding", "Hazard", "Installed", "Tested", "doctor", "installed", "judgement"]

#: The operator that is tried: it has every kind of kernel.
_PROBE = "kda"
_TIME_LIMIT = 600


@dataclass(frozen=True)
class Tested:
    """Versions that the tests ran on together; a version stands for all that begin with it."""

    torch: str
    triton: str
    python: str
    on: str


TESTED = (
    Tested("2.11", "3.6", "3.12", "NVIDIA H200"),
    Tested("2.13", "3.7.1", "3.11", "CPU and Triton's interpreter"),
    Tested("2.13", "3.9", "3.11", "CPU and Triton's interpreter"),
)


@dataclass(frozen=True)
class Hazard:
    """Versions of Triton, first and last, and compute capabilities (none: everywhere) with a known fault."""

    first: str
    last: str
    capabilities: tuple[tuple[int, int], ...]
    fault: str


KNOWN_BAD = (
    Hazard(
        "3.4",
        "3.7.0",
        ((9, 0),),
        "Triton 3.4 to 3.7.0, compute capability 9.0: some products of a transposed, cast accumulator are silently "
        "wrong; the configurations in use are checked on an H200 with 3.6, run `dplrgen verify` on others",
    ),
    Hazard(
        "3.6",
        "3.8.99",
        ((9, 0),),
        "Triton before 3.9, compute capability 9.0: the bundled ptxas 12 can form wrong shared-memory addresses from a "
        "register used again too early; register limits avoid the one case found, as checked on an H200 with 3.6",
    ),
    Hazard(
        "3.9.0",
        "3.9.0",
        (),
        "Triton 3.9.0, interpreter alone: bfloat16 products are wrong; use float32 or float16 there",
    ),
)

#: The oldest that the package asks for.
_LEAST = {"torch": "2.11", "triton": "3.6"}


@dataclass(frozen=True)
class Installed:
    """The versions here (None: not installed), and the GPUs by name and compute capability."""

    python: str
    torch: str | None
    triton: str | None
    gpus: tuple[tuple[str, tuple[int, int]], ...] = ()


@dataclass(frozen=True)
class Finding:
    """A back end: works, fails (with the reason), or absent (with the reason)."""

    backend: str
    state: str
    detail: str


def doctor() -> tuple[str, bool]:
    """The account, and whether no back end that is there fails."""
    here = installed()
    found = [_on_cpu(here), _in_interpreter(here), _on_cuda(here)]
    return "\n".join(_lines(here, found)) + "\n", all(f.state != "fails" for f in found)


# ---------------------------------------------------------------------------------------------------------------------
# Versions


def installed() -> Installed:
    """What is installed, read without importing it, and the devices that torch sees."""
    torch_version = _version("torch")
    return Installed(platform.python_version(), torch_version, _version("triton"), _gpus() if torch_version else ())


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _gpus() -> tuple[tuple[str, tuple[int, int]], ...]:
    import torch

    if not torch.cuda.is_available():
        return ()
    cards = range(torch.cuda.device_count())
    return tuple((torch.cuda.get_device_name(i), torch.cuda.get_device_capability(i)) for i in cards)


def _numbers(version: str) -> tuple[int, ...]:
    """The release of a version, 2.13.0+cpu as (2, 13, 0)."""
    digits = (part for part in version.split("+")[0].split("."))
    return tuple(int(part) for part in digits if part.isdigit())


def _begins(version: str | None, prefix: str) -> bool:
    wanted = _numbers(prefix)
    return version is not None and _numbers(version)[: len(wanted)] == wanted


def _within(version: str, first: str, last: str) -> bool:
    width = 3
    low, this, high = ((*_numbers(v), 0, 0, 0)[:width] for v in (first, version, last))
    return low <= this <= high


def judgement(here: Installed) -> Iterator[str]:
    """Whether the set was tested, and what is known to be wrong with it."""
    match = next((t for t in TESTED if _matches(here, t)), None)
    if match is not None:
        yield f"tested on {match.on}"
    else:
        yield "untried together: run `dplrgen verify --variant NAME` for the variants you use"
    for name, least in _LEAST.items():
        version = here.torch if name == "torch" else here.triton
        if version is not None and _numbers(version) < _numbers(least):
            yield f"too old: {name} {version}, at least {least} is needed"
    for name, capability in here.gpus:
        if match is not None and name not in match.on:
            yield f"untried GPU for this set: {name}, compute capability {capability[0]}.{capability[1]}"
    for hazard in KNOWN_BAD:
        here_too = not hazard.capabilities or any(c in hazard.capabilities for _, c in here.gpus)
        if here.triton is not None and here_too and _within(here.triton, hazard.first, hazard.last):
            yield f"known fault: {hazard.fault}"


def _matches(here: Installed, tested: Tested) -> bool:
    versions = ((here.torch, tested.torch), (here.triton, tested.triton), (here.python, tested.python))
    return all(_begins(version, prefix) for version, prefix in versions)


# ---------------------------------------------------------------------------------------------------------------------
# Back ends


def _on_cpu(here: Installed) -> Finding:
    name = "PyTorch on the CPU"
    if here.torch is None:
        return Finding(name, "absent", "torch is not installed")
    return _tried(name, "cpu", "float32")


def _on_cuda(here: Installed) -> Finding:
    name = "Triton on CUDA"
    if here.torch is None or here.triton is None:
        return Finding(name, "absent", f"{'torch' if here.torch is None else 'triton'} is not installed")
    if not here.gpus:
        return Finding(name, "absent", "torch sees no CUDA device")
    return _tried(name, "cuda", "bfloat16")


def _tried(name: str, device: str, dtype: str) -> Finding:
    """Run the probe in this process."""
    started = time.perf_counter()
    try:
        error = probe(device, dtype)
    except Exception as failure:
        return Finding(name, "fails", _one_line(failure))
    seconds = time.perf_counter() - started
    state = "fails" if error else "works"
    return Finding(name, state, error or f"{_PROBE} in {dtype}, forward and backward, {seconds:.1f} s")


def _in_interpreter(here: Installed) -> Finding:
    """Run the kernels in Triton's interpreter, in a process of its own: a kernel's file reads the choice on import."""
    name = "Triton's interpreter"
    if here.torch is None or here.triton is None:
        return Finding(name, "absent", f"{'torch' if here.torch is None else 'triton'} is not installed")
    code = "from dplrgen.doctor import probe; raise SystemExit(probe('interpreter', 'float32') or 0)"
    environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    started = time.perf_counter()
    try:
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=_TIME_LIMIT
        )
    except subprocess.TimeoutExpired:
        return Finding(name, "fails", f"no answer in {_TIME_LIMIT} s")
    if done.returncode:
        return Finding(name, "fails", (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1])
    seconds = time.perf_counter() - started
    return Finding(name, "works", f"{_PROBE} in float32, forward and backward, {seconds:.1f} s")


def probe(backend: str, dtype: str) -> str:
    """Run a small operator on cpu, cuda or interpreter; what is wrong with its results, empty if nothing."""
    import torch

    from dplrgen import verify
    from dplrgen.variants import get

    variant = get(_PROBE)
    case = verify.Case("mild", 1, 70, 1, 2, 32, 16)
    call = verify.kernels(variant) if backend == "interpreter" else verify.operator(variant)
    device = "cuda" if backend == "cuda" else "cpu"
    measured = verify.measure(variant, call, case, getattr(torch, dtype), device)
    return ", ".join(f"{m.name} is {m.excess:.1f} times beyond its bound" for m in measured if not m.passes)


def _one_line(failure: BaseException) -> str:
    return " ".join(f"{type(failure).__name__}: {failure}".split())


# ---------------------------------------------------------------------------------------------------------------------
# Text


def _lines(here: Installed, found: list[Finding]) -> Iterator[str]:
    yield f"dplrgen  {dplrgen.__version__}"
    yield f"python   {here.python} on {platform.system()} {platform.machine()}"
    yield f"torch    {here.torch or 'not installed'}"
    yield f"triton   {here.triton or 'not installed'}"
    for name, (major, minor) in here.gpus:
        yield f"device   {name}, compute capability {major}.{minor}"
    if not here.gpus:
        yield "device   CPU only"
    yield ""
    for finding in found:
        yield f"{finding.backend:22} {finding.state:7} {finding.detail}"
    yield ""
    yield from (f"this set  {line}" for line in judgement(here))
    yield ""
    yield "tested together"
    for t in TESTED:
        yield f"  torch {t.torch:5} triton {t.triton:6} python {t.python:5} {t.on}"
    yield "known faults"
    for hazard in KNOWN_BAD:
        yield f"  {hazard.fault}"
