"""Runs the kernels of built variants in Triton's interpreter, in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import bindings
import metrics
import pytest
import torch

import dplrgen
from dplrgen import Variant

WORKER = Path(__file__).with_name("file_worker.py")
TIME_LIMIT = 600


def run_files(cases: Sequence[tuple[Variant, bindings.Inputs]], folder: Path) -> list[metrics.Result | str]:
    """Values and gradients of each variant's kernels, or what they raised."""
    pytest.importorskip("triton", reason="the interpreter is part of triton")
    jobs, results = folder / "jobs.pt", folder / "results.pt"
    torch.save([_job(variant, given) for variant, given in cases], jobs)
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(WORKER), str(jobs), str(results)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=TIME_LIMIT)
    assert done.returncode == 0, done.stderr[-3000:]
    return [
        found if isinstance(found, str) else bindings.result_of(variant, found[0], found[1], found[2:])
        for (variant, _), found in zip(cases, torch.load(results), strict=True)
    ]


def _job(variant: Variant, given: bindings.Inputs) -> dict:
    module = sys.modules[dplrgen.build(variant).__module__]
    tensors = {"h0": given.h0.detach(), "do": given.do, "dht": given.dht, "scale": given.scale}
    streams = [x.detach() for x in given.streams]
    return {"name": f"interpreted_{variant.name}", "path": module.__file__, "streams": streams, **tensors}
