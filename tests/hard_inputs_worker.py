"""Runs bfloat16 kernels on hard inputs, in the interpreter with a GPU's products, and judges them.

    TRITON_INTERPRET=1 python hard_inputs_worker.py KIND K VARIANT ...

KIND is keys (equal, long), mixed (gates of 0 beside -50) or plain (no inputs are hard; a scale that bfloat16 rounds).
Prints one JSON object, variant -> what the inputs are -> {"failures": lines, "rr": {tensor: rr}}.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import sys
from collections.abc import Iterator

import contract
import emulation
import metrics
import torch
from interpreter_worker import run_module
from oracles import names


@dataclasses.dataclass(frozen=True)
class Emulated(contract.Place):
    dtype: torch.dtype = torch.bfloat16

    def length(self, tokens: int) -> int:
        return min(tokens, 100)


def calls(kind: str, name: str, place: Emulated) -> Iterator[tuple[str, tuple]]:
    if kind == "keys":
        yield from contract.hard_key_calls(name, place)
    elif kind == "mixed":
        yield from ((label, given) for label, given in contract.strong_gate_calls(name, place) if "0 or -50" in label)
    else:
        yield "plain", place.inputs(name, 300, H=1, HV=2)


def main(kind: str, K: int, variants: list[str]) -> None:
    torch.set_num_threads(1)
    emulation.install()
    place = Emulated(K=K, V=60)
    report: dict[str, dict[str, dict[str, object]]] = {name: {} for name in variants}
    for name in variants:
        module = importlib.import_module(f"dplrgen.generated.{name}")
        for label, (streams, h0, do, dht) in calls(kind, name, place):
            found = run_module(module, [x.detach() for x in streams], h0.detach(), do, dht)
            got = dict(zip(("o", "ht", *(f"d{n}" for n in names(name)), "dh0"), found, strict=True))
            ref = metrics.reference(name, streams, h0, do, dht)
            failures = metrics.check(name, got, ref, torch.bfloat16, streams)
            report[name][label] = {"failures": failures, "rr": metrics.worst(got, ref)}
    print(json.dumps(report))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3:])
