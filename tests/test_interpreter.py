"""The Triton kernels themselves, run on the CPU by Triton's interpreter in processes of their own."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from oracles import ORACLES

pytest.importorskip("triton", reason="the interpreter is part of triton")

WORKER = Path(__file__).with_name("interpreter_worker.py")
PER_PROCESS = 3
TIME_LIMIT = 600


@functools.lru_cache
def report_of(group: int) -> dict[str, dict]:
    """What the worker says about the variants of one group; a few share a process, since starting one takes seconds."""
    variants = list(ORACLES)[group * PER_PROCESS : (group + 1) * PER_PROCESS]
    environment = {
        **os.environ,
        "TRITON_INTERPRET": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
    }
    done = subprocess.run(
        [sys.executable, str(WORKER), *variants], capture_output=True, text=True, env=environment, timeout=TIME_LIMIT
    )
    if done.returncode != 0:
        return {name: {"crash": done.stderr[-3000:]} for name in variants}
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize(("name", "group"), [(n, i // PER_PROCESS) for i, n in enumerate(ORACLES)], ids=list(ORACLES))
def test_kernels_in_the_interpreter(name: str, group: int, dtype: str) -> None:
    report = report_of(group)[name]
    assert "crash" not in report, report["crash"]
    entry = report[dtype]
    assert not entry["failures"], "\n".join(entry["failures"])
    assert {"o", "ht", "dq", "dk", "dv"} <= entry["worst"].keys()
