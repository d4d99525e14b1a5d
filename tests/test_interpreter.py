"""The Triton kernels themselves, run on the CPU by Triton's interpreter in processes of their own."""

from __future__ import annotations

import json
import os
import re
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


def _interpreted(worker: Path, *arguments: str) -> dict:
    """The object that a worker prints last."""
    environment = {
        **os.environ,
        "TRITON_INTERPRET": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
    }
    command = [sys.executable, str(worker), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=TIME_LIMIT)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_two_parts_and_powers_of_two() -> None:
    """A product of operands in two parts, and a refined inverse, have most of their digits back; a tile scaled into
    float16's range loses none; what is not finite stays so, a GPU's NaN too."""
    found = _interpreted(WORKER.with_name("helpers_worker.py"))
    assert 1e-4 < found["plain"] < 1e-3
    assert all(found[key] < 1e-6 for key in ("x", "y", "both", "tf32 in parts")), found
    assert 1e-4 < found["tf32"] < 1e-3
    assert max(found["refined"], found["refined in tf32"]) < 1e-3 < 4e-3 < found["inverse"], found
    for size, tile in found["ranged"].items():
        assert 2.0**14 <= tile["largest"] < 2.0**15, (size, tile)
        assert tile["same"], (size, tile)
    assert found["zero"]["largest"] == 0.0
    assert 0.0 < found["zero"]["unit"] < float("inf")
    assert found["not scaled"]["unit"] == 1.0
    assert found["not scaled"]["same"]
    assert found["infinite"]
    assert all(all(shown.values()) for shown in found["kept"]), found["kept"]


@pytest.mark.parametrize("variants", GROUPS, ids="-".join)
def test_kernels_in_the_interpreter(variants: list[str]) -> None:
    report = _interpreted(WORKER, *variants)
    assert list(report) == variants
    failures = [f"{name} {line}" for name in variants for entry in report[name].values() for line in entry["failures"]]
    assert not failures, "\n".join(failures)
    for name in variants:
        for dtype in ("float32", "float16", "bfloat16"):
            assert {"o", "ht", "dq", "dk", "dv"} <= report[name][dtype]["worst"].keys()


#: One token undoes the last, and operands of 16 bits do not hold what is left: judged by a multiple of the bound.
HARDEST = "keys equal, beta 1.99, T = 100"
TIMES = {64: 4.0, 128: 6.0}


@pytest.mark.parametrize(
    ("K", "variants"), [(64, ["gdn", "delta"]), (64, ["kda", "comba"]), (64, ["dplr"]), (128, ["kda", "gdn"])], ids=str
)
def test_bfloat16_kernels_on_hard_keys(K: int, variants: list[str]) -> None:
    """Equal keys, beta to 2, keys of 1.4 and of 2: within bounds with a GPU's products; the hardest, within a few."""
    report = _interpreted(WORKER.with_name("hard_inputs_worker.py"), "keys", str(K), *variants)
    for name in variants:
        assert len(report[name]) == (5 if name == "delta" else 6)
        for label, failures in ((label, found["failures"]) for label, found in report[name].items()):
            if label == HARDEST:
                for line in failures:
                    found = re.search(r": rr ([\d.e+-]+), bound ([\d.e+-]+)", line) or re.search(
                        r": ([\d.]+) times the bound of its head .*, limit (\d+)$", line
                    )
                    assert found, (name, line)
                    assert float(found[1]) <= TIMES[K] * float(found[2]), (name, line)
            else:
                assert not failures, (name, label, failures)


def test_gate_gradients_lose_no_more_than_others() -> None:
    """What rows gain and columns lose for a pair beyond a token cancels in bfloat16, at a scale that it rounds too."""
    report = _interpreted(WORKER.with_name("hard_inputs_worker.py"), "plain", "32", "kda", "gdn", "simple_gla", "gdn2")
    for name, found in report.items():
        assert not found["plain"]["failures"], (name, found)
        assert found["plain"]["rr"]["dg"] < 4e-3, (name, found["plain"]["rr"])


def test_gates_of_nothing_beside_gates_of_all_leave_no_noise() -> None:
    """Where the clip takes every gate of 0, the gradients left are far below rounding, and none is made up."""
    report = _interpreted(WORKER.with_name("hard_inputs_worker.py"), "mixed", "32", "gdn2_clipped", "gla")
    assert not [line for found in report.values() for entry in found.values() for line in entry["failures"]]


def test_products_as_on_a_gpu() -> None:
    """The emulation itself: products of bfloat16 tiles are theirs, TF32 ones those of operands cut off."""
    found = _interpreted(WORKER.with_name("emulation_worker.py"))
    assert found["bfloat16"] == 0.0
    assert found["tf32"] < 1e-6 < found["tf32 beside float32"]
    assert found["ieee"] < 1e-6
    assert found["rounding"]
