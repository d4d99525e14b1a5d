"""Runs the Triton kernels of generated files in Triton's interpreter, on the CPU.

    TRITON_INTERPRET=1 python file_worker.py jobs.pt results.pt

A process of its own: the variable is read when a kernel's file is imported. A job holds the path of a file and the
arguments of a forward and backward; its result is the tensors that both give, or the last lines of what was raised.
A generated file stands alone, so the process need not know the binding or its operations.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import traceback

import torch
from torch import Tensor


def run(job: dict) -> list[Tensor]:
    spec = importlib.util.spec_from_file_location(job["name"], job["path"])
    module = importlib.util.module_from_spec(spec)
    sys.modules[job["name"]] = module
    spec.loader.exec_module(module)
    streams, h0, scale = job["streams"], job["h0"], job["scale"]
    every = (1 << (len(streams) + 1)) - 1
    with torch.no_grad():
        o, ht, *saved = module._forward_triton(*streams, h0, None, None, scale, True, True)
        grads = module._backward_triton(job["do"], job["dht"], *streams, h0, None, None, *saved, scale, every)
    return [o, ht, *grads]


def main(jobs: str, results: str) -> None:
    if os.environ.get("TRITON_INTERPRET") != "1":
        raise SystemExit("TRITON_INTERPRET=1 must be set before this process starts")
    torch.set_num_threads(1)
    done: list[list[Tensor] | str] = []
    for job in torch.load(jobs):
        try:
            done.append(run(job))
        except Exception:
            done.append("\n".join(traceback.format_exc().splitlines()[-8:]))
    torch.save(done, results)


if __name__ == "__main__":
    main(*sys.argv[1:])
