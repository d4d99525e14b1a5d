"""Runs bfloat16 kernels on keys that repeat or are long, in the interpreter with a GPU's products, and judges them.

    TRITON_INTERPRET=1 python hard_keys_worker.py K VARIANT ...

Prints one JSON object, variant -> what the keys are -> failures, a line each.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import sys

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


def main(K: int, variants: list[str]) -> None:
    torch.set_num_threads(1)
    emulation.install()
    place = Emulated(K=K, V=60)
    report: dict[str, dict[str, list[str]]] = {name: {} for name in variants}
    for name in variants:
        module = importlib.import_module(f"dplrgen.generated.{name}")
        for label, (streams, h0, do, dht) in contract.hard_key_calls(name, place):
            found = run_module(module, [x.detach() for x in streams], h0.detach(), do, dht)
            got = dict(zip(("o", "ht", *(f"d{n}" for n in names(name)), "dh0"), found, strict=True))
            ref = metrics.reference(name, streams, h0, do, dht)
            report[name][label] = metrics.check(name, got, ref, torch.bfloat16, streams)
    print(json.dumps(report))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
