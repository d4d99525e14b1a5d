"""Runs the Triton kernels of generated modules in Triton's interpreter, on the CPU, and judges them.

    TRITON_INTERPRET=1 python interpreter_worker.py kda gdn ...

A process of its own: the variable is read when a kernel's file is imported. Prints one JSON object,
variant -> dtype -> {"failures": [...], "worst": {tensor: rr}}; a crash counts as a failure, with its last lines.
Products are made as a GPU makes them (emulation.py), so 16-bit results lose here what they lose there.
"""

from __future__ import annotations

import importlib
import itertools
import json
import os
import sys
import traceback

import emulation
import metrics
import torch
from contract import scattered
from inputs import has_gate, make
from oracles import names
from torch._subclasses.fake_tensor import FakeTensorMode

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}

# (dtype, B, T, H, HV, K, V, regime, with a state): two chunks and a tail for chunks of 16 in float32 and of 64 in
# 16 bits, which are the largest that either would take; the "spikes" and "strong" are where exponents go wrong.
CASES = [
    ("float32", 1, 37, 1, 2, 20, 24, "mild", True),
    ("float32", 1, 33, 1, 1, 16, 18, "spikes", True),
    ("float16", 1, 131, 1, 1, 16, 24, "mild", True),
    ("float16", 1, 66, 1, 1, 20, 18, "strong", False),
    ("bfloat16", 1, 131, 1, 2, 16, 24, "mild", True),
]


def run_case(name: str, case: tuple) -> tuple[list[str], dict[str, float]]:
    dtype_name, *sizes, regime, state = case
    dtype = DTYPES[dtype_name]
    gate_dtype = torch.float32 if regime == "strong" else None
    streams, h0, do, dht = make(name, *sizes, dtype, gate_dtype=gate_dtype, regime=regime, state=state, seed=80)
    module = importlib.import_module(f"dplrgen.generated.{name}")
    scale = sizes[-2] ** -0.5
    ref = metrics.reference(name, streams, h0, do, dht, scale)

    plain, state0 = [x.detach() for x in streams], None if h0 is None else h0.detach()
    with torch.no_grad():
        o, ht, *saved = module._forward_triton(*plain, state0, None, None, scale, True, True)
        every = (1 << (len(plain) + 1)) - 1 if state else (1 << len(plain)) - 1
        grads = module._backward_triton(do, dht, *plain, state0, None, None, *saved, scale, every)

    keys = [f"d{n}" for n in names(name)] + ["dh0"] * state
    got = {"o": o, "ht": ht, **dict(zip(keys, list(grads)[: len(keys)], strict=True))}
    failures = metrics.check(name, got, ref, dtype, streams)
    if dtype_name == "float32" and regime == "mild":
        with torch.no_grad():
            again, *_ = module._forward_triton(*plain, state0, None, None, scale, False, False)
        if not torch.equal(o, again):
            failures.append("o: differs between a call that saves for backward and one that does not")
    leaves = {**dict(zip(keys, streams, strict=False)), "dh0": h0}
    failures += [
        f"{k}: {got[k].dtype} for an input of {leaves[k].dtype}" for k in keys if got[k].dtype != leaves[k].dtype
    ]
    return [f"{dtype_name} {regime} {'x'.join(map(str, sizes))}: {line}" for line in failures], metrics.worst(got, ref)


# Packed: empty sequences at both ends and inside, whole chunks, tails, and rows that belong to none.
BOUNDS = (0, 0, 5, 5, 37, 40, 40)
BAD_BOUNDS = (-7, 3, 60, 20, 2**31 - 1, 33)  # out of order and range: nothing outside the tensors is read or written
PACKED_SIZES = (1, 45, 1, 2, 20, 24)


def run_module(module, streams, h0, do, dht, packing=(None, None)):
    """Values and every gradient of the kernels, states included, as one flat list."""
    scale = streams[0].shape[-1] ** -0.5
    with torch.no_grad():
        o, ht, *saved = module._forward_triton(*streams, h0, *packing, scale, True, True)
        every = (1 << (len(streams) + 1)) - 1
        return [o, ht, *module._backward_triton(do, dht, *streams, h0, *packing, *saved, scale, every)]


def run_layouts(name: str) -> list[str]:
    """Packed against one call a sequence, and strided against contiguous: the same bits; NaN around changes none."""
    module = importlib.import_module(f"dplrgen.generated.{name}")
    streams, _, do, _ = make(name, *PACKED_SIZES, torch.float32, regime="mild", state=False, seed=81)
    streams = [x.detach() for x in streams]
    count, (_, _, _, HV, K, V) = len(BOUNDS) - 1, PACKED_SIZES
    generator = torch.Generator().manual_seed(82)
    h0, dht = torch.randn(2, count, HV, K, V, generator=generator)
    chunk = module._config(K, torch.float32)[0]
    packing = module._packing(torch.tensor(BOUNDS), PACKED_SIZES[1], chunk)
    nan = float("nan")
    for x in (*streams, do):
        x[:, BOUNDS[-1] :] = nan
    got = run_module(module, streams, h0, do, dht, packing)
    failures = []
    for n, (start, end) in enumerate(itertools.pairwise(BOUNDS)):
        own = [x[:, start:end].contiguous() for x in streams]
        alone = run_module(module, own, h0[n : n + 1], do[:, start:end], dht[n : n + 1])
        for label, x, y in zip(("o", "ht", *(f"d{s}" for s in names(name)), "dh0"), got, alone, strict=True):
            part = x[n : n + 1] if label in ("ht", "dh0") else x[:, start:end]
            if not torch.equal(part, y):
                failures.append(f"packed: {label} of sequence {n} differs from a call of its own")
    for i, x in enumerate(got):
        if i != 1 and i != len(got) - 1 and (x[:, BOUNDS[-1] :] != 0).any():
            failures.append(f"packed: result {i} is not 0 past the last boundary")
    bad = module._packing(torch.tensor(BAD_BOUNDS), PACKED_SIZES[1], chunk)
    own = [torch.where(x.isnan(), 0.5, x) for x in streams]
    results = run_module(module, own, h0, torch.where(do.isnan(), 0.5, do), dht, bad)
    failures += [f"bad boundaries: result {i} is not finite" for i, x in enumerate(results) if not x.isfinite().all()]
    views = [scattered(x) for x in streams]
    wide_do = do[..., :1].expand(do.shape)
    far = run_module(module, views, h0, wide_do, dht, packing)
    near = run_module(module, streams, h0, wide_do.contiguous(), dht, packing)
    failures += [
        f"strided: result {i} differs" for i, (x, y) in enumerate(zip(far, near, strict=True)) if not torch.equal(x, y)
    ]
    failures += [f"strided: result {i} has gaps" for i, x in enumerate(far) if not x.is_contiguous()]
    return failures


def run_fakes(name: str) -> list[str]:
    """What torch.compile is told of a GPU call's results is what the kernels' launcher gives, kept values included."""
    module = importlib.import_module(f"dplrgen.generated.{name}")
    failures = []
    for dtype in (torch.float32, torch.float16, torch.bfloat16):  # bfloat16: of the dtypes alone
        streams, h0, _, _ = make(name, 1, 3, 1, 2, 16, 18, dtype, regime="mild" if has_gate(name) else "zero", seed=83)
        given = [x.detach() for x in (*streams, h0)]
        for save in (True, False):
            rest = (None, None, 0.25, True, save)
            with torch.no_grad():
                real = module._flat(module._forward_triton(*given, *rest))
            with FakeTensorMode():
                told = module._forward_fake(*(torch.empty(x.shape, dtype=x.dtype, device="cuda") for x in given), *rest)
            failures += [
                f"result {i} is {x.dtype} {list(x.shape)}, told {y.dtype} {list(y.shape)} ({dtype}, save={save})"
                for i, (x, y) in enumerate(zip(real, told, strict=True))
                if (x.dtype, x.shape) != (y.dtype, y.shape)
            ]
    return failures


def main(variants: list[str]) -> None:
    if os.environ.get("TRITON_INTERPRET") != "1":
        raise SystemExit("TRITON_INTERPRET=1 must be set before this process starts")
    torch.set_num_threads(1)
    emulation.install()
    report: dict[str, dict[str, dict[str, object]]] = {}
    for name in variants:
        report[name] = {dtype: {"failures": [], "worst": {}} for dtype in DTYPES}
        for case in CASES:
            if case[-2] != "mild" and not has_gate(name):
                continue
            entry = report[name][case[0]]
            try:
                failures, worst = run_case(name, case)
            except Exception:
                failures, worst = ["\n".join(traceback.format_exc().splitlines()[-12:])], {}
            entry["failures"] += failures
            entry["worst"] = {k: max(v, entry["worst"].get(k, 0.0)) for k, v in worst.items()} or entry["worst"]
        for check in (run_layouts, run_fakes):
            try:
                report[name]["float32"]["failures"] += check(name)
            except Exception:
                report[name]["float32"]["failures"] += ["\n".join(traceback.format_exc().splitlines()[-12:])]
    print(json.dumps(report))


if __name__ == "__main__":
    main(sys.argv[1:])
