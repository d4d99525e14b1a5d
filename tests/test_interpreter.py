"""The Triton kernels themselves, run on the CPU by Triton's interpreter in processes of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from oracles import ORACLES

pytest.importorskip("triton", reason="the interpreter is part of triton")

WORKER = Path(__file__).with_name("interpreter_worker.py")
TIME_LIMIT = 600

# Starting a process takes seconds, so a few variants share one.
VARIANTS = list(ORACLES)
GROUPS = [VARIANTS[i : i + 3] for i in range(0, len(VARIANTS), 3)]


@pytest.mark.parametrize("variants", GROUPS, ids="-".join)
def test_kernels_in_the_interpreter(variants: list[str]) -> None:
    environment = {
        **os.environ,
        "TRITON_INTERPRET": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
    }
    done = subprocess.run(
        [sys.executable, str(WORKER), *variants], capture_output=True, text=True, env=environment, timeout=TIME_LIMIT
    )
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads(done.stdout.splitlines()[-1])
    assert list(report) == variants
    failures = [f"{name} {line}" for name in variants for entry in report[name].values() for line in entry["failures"]]
    assert not failures, "\n".join(failures)
    for name in variants:
        for dtype in ("float32", "float16"):
            assert {"o", "ht", "dq", "dk", "dv"} <= report[name][dtype]["worst"].keys()
