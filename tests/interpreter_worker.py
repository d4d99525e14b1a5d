"""Runs the Triton kernels of generated modules in Triton's interpreter, on the CPU, and judges them.

    TRITON_INTERPRET=1 python interpreter_worker.py kda gdn ...

A process of its own: the variable is read when a kernel's file is imported. Prints one JSON object,
variant -> dtype -> {"failures": [...], "worst": {tensor: rr}}; a crash counts as a failure, with its last lines.
bfloat16 is left out: the interpreter multiplies its bit patterns.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import traceback

import metrics
import torch
from inputs import has_gate, make
from oracles import names

DTYPES = {"float32": torch.float32, "float16": torch.float16}

# (dtype, B, T, H, HV, K, V, regime, with a state): two chunks and a tail for chunks of 16 in float32 and of 64 in
# float16, which are the largest that either would take; the second line of each is where exponents go wrong.
CASES = [
    ("float32", 1, 37, 1, 2, 20, 24, "mild", True),
    ("float32", 1, 33, 1, 1, 16, 18, "spikes", True),
    ("float16", 1, 131, 1, 1, 16, 24, "mild", True),
    ("float16", 1, 66, 1, 1, 20, 18, "strong", False),
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
        o, ht, *saved = module._forward_triton(*plain, state0, scale, True, True)
        every = (1 << (len(plain) + 1)) - 1 if state else (1 << len(plain)) - 1
        grads = module._backward_triton(do, dht, *plain, state0, *saved, scale, every)

    keys = [f"d{n}" for n in names(name)] + ["dh0"] * state
    got = {"o": o, "ht": ht, **dict(zip(keys, list(grads)[: len(keys)], strict=True))}
    failures = metrics.check(name, got, ref, dtype, streams)
    if dtype_name == "float32" and regime == "mild":
        with torch.no_grad():
            again, *_ = module._forward_triton(*plain, state0, scale, False, False)
        if not torch.equal(o, again):
            failures.append("o: differs between a call that saves for backward and one that does not")
    leaves = {**dict(zip(keys, streams, strict=False)), "dh0": h0}
    failures += [
        f"{k}: {got[k].dtype} for an input of {leaves[k].dtype}" for k in keys if got[k].dtype != leaves[k].dtype
    ]
    return [f"{dtype_name} {regime} {'x'.join(map(str, sizes))}: {line}" for line in failures], metrics.worst(got, ref)


def main(variants: list[str]) -> None:
    if os.environ.get("TRITON_INTERPRET") != "1":
        raise SystemExit("TRITON_INTERPRET=1 must be set before this process starts")
    torch.set_num_threads(1)
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
    print(json.dumps(report))


if __name__ == "__main__":
    main(sys.argv[1:])
