"""The scripts of benchmarks/, as far as they run without a GPU: the design, the fast reference, workers, tables."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import bench  # noqa: E402
import check_contract  # noqa: E402
import check_gpu  # noqa: E402
import covering  # noqa: E402
import fastref  # noqa: E402
import metrics  # noqa: E402
import one_token  # noqa: E402
import peers  # noqa: E402
import tune  # noqa: E402
from covering import Case  # noqa: E402
from inputs import REGIMES, erases_freely, has_gate, make  # noqa: E402
from oracles import ORACLES, SIGNATURES, names  # noqa: E402

torch.set_num_threads(1)


# ---------------------------------------------------------------------------------------------------------------------
# The contract


def test_the_contract_is_whole_and_its_draws_are_those_of_the_seed() -> None:
    parts = ("huge", "large", "checks", "draws")
    items = check_contract.items(parts, 20, seed=3)
    labels = [check_contract.label(item) for item in items]
    assert len(set(labels)) == len(labels)
    assert items == check_contract.items(parts, 20, seed=3)
    fixed = check_contract.items(["draws"], 20, 3, dict([check_contract.choice("dtype=bfloat16,float16")]))
    assert {x["draw"]["dtype"] for x in fixed} == {"bfloat16", "float16"}
    with pytest.raises(argparse.ArgumentTypeError, match="NAME=VALUE"):
        check_contract.choice("dtype=bfloat17")
    assert {item["variant"] for item in items if item["part"] == "checks"} == set(ORACLES)
    assert sum(item["part"] == "draws" for item in items) == 20


def test_a_check_of_the_contract_runs_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_contract, "GPU", "cpu")
    assert check_contract.guarded("kda") == []


# ---------------------------------------------------------------------------------------------------------------------
# The design


def test_the_design_covers_every_pair() -> None:
    rows = [dataclasses.asdict(case) for case in covering.load() if case.kind == "pairs"]
    met = {pair for row in rows for pair in covering.pairs_of(row)}
    assert covering.all_pairs() <= met
    assert all(covering.may_meet(*pair) for pair in met)
    assert all(row[factor] in values for row in rows for factor, values in covering.FACTORS.items())


def test_every_pair_that_may_meet_is_asked_for() -> None:
    sizes = [len(values) for values in covering.FACTORS.values()]
    every = sum(n * m for n, m in itertools.combinations(sizes, 2))
    assert len(covering.all_pairs()) == every - (len(covering.GATES) - 1)  # delta meets one gate regime


def test_the_committed_list_is_what_its_seed_gives() -> None:
    assert covering.FILE.read_text() == covering.written()
    assert json.loads(covering.FILE.read_text())["seed"] == covering.SEED


def test_the_products_are_full() -> None:
    found = {case for case in covering.load() if case.kind == "product"}
    axes = (("kda", "dplr"), (64, 128), covering.DTYPES, covering.LENGTHS, covering.GROUPS, covering.GATES)
    wanted = itertools.product(*axes)
    assert found == {Case("product", v, dt, n, n, T, group, "both", g) for v, n, dt, T, group, g in wanted}


def test_the_names_are_those_of_the_oracles() -> None:
    assert set(covering.VARIANTS) == set(ORACLES) == set(fastref.BINDINGS)
    assert covering.GATES == REGIMES
    assert {v for v in covering.VARIANTS if not covering.may_meet(("variant", v), ("gates", "mild"))} == {
        v for v in ORACLES if not has_gate(v)
    }
    expanding = {case.variant for case in covering.load() if case.kind == "expand"}
    assert expanding == {v for v in ORACLES if erases_freely(v)}


def test_cases_stand_in_an_order_that_loses_none() -> None:
    cases = covering.load()
    ordered = check_gpu.ordered(cases, seed=1)
    assert sorted(ordered, key=str) == sorted(set(cases), key=str)
    groups = {(case.variant, case.dtype) for case in cases}
    assert {(case.variant, case.dtype) for case in ordered[: len(groups)]} == groups
    kernels = {case.compiles for case in cases}
    assert {case.compiles for case in ordered[: len(groups) + len(kernels)]} == kernels


def test_shards_are_parts_that_share_no_kernels() -> None:
    ordered = check_gpu.ordered(covering.load(), seed=1)
    shards = [check_gpu.shard(ordered, i, 3) for i in range(3)]
    assert sorted(itertools.chain(*shards), key=str) == sorted(ordered, key=str)
    for one, other in itertools.combinations(shards, 2):
        assert not {case.compiles for case in one} & {case.compiles for case in other}


def test_configuration_cases_reach_every_tile_of_every_row() -> None:
    """For every row of a table: each power of two that K is padded to, each tile of V, each dtype, both lengths."""
    module = bench.generated("kda")
    cases = check_gpu.config_cases("kda")
    lowest: dict[str, int] = {}
    for products, largest, _, kernels in module._CONFIGS:
        low = lowest.get(products, 15) + 1
        lowest[products] = largest
        dtypes = {d for d in check_gpu.DTYPES if module._PRODUCTS[check_gpu.dtypes_of(d)[0]] == products}
        here = [c for c in cases if c.dtype in dtypes and low <= c.K <= largest]
        assert {case.T for case in here} == {65, 1000}
        assert {case.dtype for case in here} == dtypes
        sides = {max(16, 1 << (K - 1).bit_length()) for K in range(low, largest + 1)}
        for dtype in dtypes:
            mine = [case for case in here if case.dtype == dtype]
            assert {module._power(case.K) for case in mine} == sides
            for block in {entry[bench.FIELDS.index("BV")] for entry in kernels.values()}:
                tiles = {min(block, module._power(V)) for V in range(1, 2 * block)}
                assert {min(block, module._power(case.V)) for case in mine} == tiles


# ---------------------------------------------------------------------------------------------------------------------
# The fast reference


@pytest.mark.parametrize("segments", [None, 1, 5])
@pytest.mark.parametrize("name", ORACLES)
def test_the_fast_reference_is_the_token_loop(name: str, segments: int | None) -> None:
    """Outputs, final state and every gradient; 41 tokens in 5 segments leave one of them partly empty."""
    regimes = [r for r in REGIMES if has_gate(name) or r == "zero"] + ["expand"] * erases_freely(name)
    for state, regime in enumerate(regimes):
        case = make(name, 2, 41, 1, 2, 17, 20, torch.float32, regime=regime, seed=3, state=state % 2 == 0)
        want = metrics.reference(name, *case, scale=0.3)
        got = fastref.reference(name, *case, scale=0.3, segments=segments)
        figures = metrics.worst(got, want)
        assert max(figures.values()) < 1e-10, (regime, figures)
        assert not metrics.check(name, got, want, torch.float64, case[0])


@pytest.mark.parametrize("name", ["kda", "dplr_absorbed"])
def test_the_fast_reference_in_slices(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One head at a time where memory is short, and long enough to be cut by itself."""
    case = make(name, 2, 131, 1, 2, 16, 18, torch.float32, regime="spikes", seed=4)
    want = metrics.reference(name, *case)
    monkeypatch.setattr(fastref, "MEMORY", 8 * 132 * 16 * 18)
    assert len(list(fastref._slices(torch.empty(4, 131, 16), torch.empty(4, 131, 18)))) == 4
    assert max(metrics.worst(fastref.reference(name, *case), want).values()) < 1e-10


# ---------------------------------------------------------------------------------------------------------------------
# The check


def small(variant: str = "kda", **other: object) -> Case:
    return dataclasses.replace(Case("pairs", variant, "bfloat16", 16, 20, 65, 2, "both", "mild"), **other)


@pytest.mark.parametrize(
    "case",
    [
        small(),
        small(dtype="bfloat16+float32", states="none", gates="spikes"),
        small("rwkv7", dtype="float32", states="out", gates="strong"),
        small("comba", dtype="float32", states="in", gates="expand", T=40),
        small("delta", dtype="float16", gates="zero", T=1),
    ],
    ids=lambda case: case.label,
)
def test_a_right_operator_passes(case: Case) -> None:
    row = check_gpu.judge(case, "cpu")
    assert row["failures"] == []
    assert ("ht" in row["rr"]) == (case.states in ("out", "both"))
    assert ("dh0" in row["rr"]) == (case.states in ("in", "both"))
    assert {f"d{n}" for n in names(case.variant)} <= row["rr"].keys()
    json.dumps(row)
    assert not torch.are_deterministic_algorithms_enabled()


def test_a_wrong_operator_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    module = bench.generated("kda")
    right = module.kda

    def wrong(q, k, v, g, beta, **options):
        o, final = right(q, k, v, g, beta, **options)
        return torch.cat([o[:, :-1], o[:, -1:] * 1.5], dim=1), final

    monkeypatch.setattr(module, "kda", wrong)
    failures = check_gpu.judge(small(), "cpu")["failures"]
    assert any(line.startswith("o:") for line in failures)


def test_unwritten_memory_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    module = bench.generated("kda")
    monkeypatch.setattr(module, "kda", lambda q, k, v, g, beta, **_: (torch.empty_like(v) + 0 * v, None))
    failures = check_gpu.judge(small(states="none"), "cpu")["failures"]
    assert any(line.startswith("o:") and "not finite" in line for line in failures)


def test_the_run_writes_rows_and_a_summary(tmp_path: Path) -> None:
    command = [sys.executable, str(BENCHMARKS / "check_gpu.py"), "--device", "cpu", "--workers", "1"]
    command += ["--out", str(tmp_path), "--only", "T(1|63)-.*-K(16|60)-", "--first", "2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = check_gpu.rows_of(tmp_path / "check.jsonl")
    assert len(rows) == 2
    assert not any(row["failures"] for row in rows)
    assert done.stdout.rstrip().splitlines()[-1].startswith("2 cases run, 0 failed, 0 not run")
    assert (tmp_path / "check.txt").read_text().rstrip() in done.stdout


def test_the_summary_names_what_failed() -> None:
    case = dataclasses.asdict(small())
    rows = [{"case": case, "label": small().label, "failures": ["o: rr 3e-1", "dq: missing"], "rr": {}}] * 27
    text = check_gpu.summary(rows, 4, 10.0, {"device": "none"})
    assert "27 cases run, 27 failed, 4 not run" in text
    assert "o: rr 3e-1 (and 1 more)" in text
    assert "and 2 more cases" in text
    assert "by gates: mild 27" in text


# ---------------------------------------------------------------------------------------------------------------------
# Workers

WORKER = f"""
import os, sys, time
sys.path.insert(0, {str(BENCHMARKS)!r})
import bench

def handle(item):
    print("noise")
    if item["do"] == "crash":
        print("the last words", file=sys.stderr, flush=True)
        os.abort()
    if item["do"] == "raise":
        raise ValueError("no")
    if item["do"] == "hang":
        time.sleep(60)
    return {{"process": os.getpid(), "n": item["n"]}}

bench.serve(handle)
"""


def run_items(actions: list[str], workers: int = 1, **options: float) -> tuple[dict[int, dict], list[dict]]:
    answers: dict[int, dict] = {}
    items = [{"do": action, "n": n} for n, action in enumerate(actions)]
    command = [sys.executable, "-c", WORKER]
    left = bench.run_pool(command, items, workers, lambda item, a: answers.update({item["n"]: a}), **options)
    return answers, left


def test_a_crash_costs_one_item() -> None:
    answers, left = run_items(["work", "raise", "work", "crash", "work"])
    assert left == []
    assert "ValueError: no" in answers[1]["error"]
    assert "the last words" in answers[3]["error"]
    first, second, third = (answers[n]["row"]["process"] for n in (0, 2, 4))
    assert first == second != third


def test_an_item_that_hangs_is_given_up() -> None:
    start = time.monotonic()
    answers, _ = run_items(["hang", "work"], item_seconds=3.0)
    assert "TimeoutError" in answers[0]["error"]
    assert answers[1]["row"]["n"] == 1
    assert time.monotonic() - start < 30


def test_nothing_begins_after_the_budget() -> None:
    answers, left = run_items(["work"] * 4, workers=2, until=time.monotonic() - 1)
    assert answers == {}
    assert [item["n"] for item in left] == [0, 1, 2, 3]


# ---------------------------------------------------------------------------------------------------------------------
# Peers and tuning


def test_shapes_in_words() -> None:
    assert peers.Shape.of("1,8192,64", 128, 64) == peers.Shape(1, 8192, 64, 64, 128, 64)
    assert peers.Shape.of("2,40,3,6,16", 128, 20) == peers.Shape(2, 40, 3, 6, 16, 20)
    assert peers.Shape.of("2,40,3,6,16,18", 1, 1) == peers.Shape(2, 40, 3, 6, 16, 18)


@pytest.mark.parametrize("variant", covering.VARIANTS)
def test_timed_inputs_are_those_of_the_variant(variant: str) -> None:
    shape = peers.Shape(2, 9, 1, 2, 16, 20)
    streams, do = peers.draw(variant, shape, torch.float16, torch.float32, "cpu")
    like, _, _, _ = make(variant, *dataclasses.astuple(shape), torch.float16, gate_dtype=torch.float32)
    assert [(x.shape, x.dtype) for x in streams] == [(x.shape, x.dtype) for x in like]
    assert all(x.requires_grad and x.is_leaf for x in streams)
    assert do.shape == streams[names(variant).index("v")].shape
    row = peers.measure(peers.operator(variant, peers.OURS), streams, do, 0.25, "cpu", 1.0)
    assert all(isinstance(row[key], float) for key in ("infer", "forward", "forward+backward"))


def test_peers_take_the_streams_of_their_variant() -> None:
    """Wherever a peer stands beside another variant, the call that is timed has as many streams."""
    for variant, name in peers.MEANT_AS:
        assert name in peers.PEERS[variant]
        assert len(SIGNATURES[variant]) == len(SIGNATURES[peers.streams_of(variant, name)])


def test_a_report_with_failures() -> None:
    row = {"variant": "gdn", "shape": "1,8,2,16,16", "name": "fla", "infer": 0.5, "forward": 1.0, "error": None}
    text = peers.report([row | {"forward+backward": "RuntimeError: no", "peak MiB": None, "rr": {"o": 1e-3}}])
    assert "failed  gdn fla: RuntimeError: no" in text
    assert "o 1.0e-03" in text


WARMED = f"""
import sys
sys.path.insert(0, {str(BENCHMARKS)!r})
import bench
bench.use_checkout()
import torch, triton, triton.language as tl
import peers

ran = []
@triton.autotune([triton.Config({{"BLOCK": b}}) for b in (16, 32, 64)], key=["n"])
@triton.jit
def fill(x, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x + i, BLOCK, mask=i < n)

for part in range(5):
    with peers.only_compiling(part, 5):
        x = torch.zeros(8, dtype=torch.int32)
        fill[(1,)](x, 8)
        ran.append(int(x[0]))
print(ran)
"""


def test_warming_compiles_a_part_of_the_configurations(tmp_path: Path) -> None:
    """Three configurations and five parts: all are reached, and no part times anything."""
    pytest.importorskip("triton")
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    script = tmp_path / "warmed.py"
    script.write_text(WARMED)
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, env=environment, timeout=120)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == [16, 32, 64, 16, 32]


def test_a_table_is_patched_and_put_back() -> None:
    module = bench.generated("kda")
    before = module._CONFIGS
    row = tune.row_of(module, 64, torch.float32)
    table = before[row][-1]
    key = next(iter(table))
    entry = tuple(n + 1 for n in table[key])
    with tune.patched(module, row, {key: entry}, chunk=8):
        assert module._CONFIGS[row][-1] == table | {key: entry}
        assert module._CONFIGS[row][2] == 8
    assert module._CONFIGS is before


def test_the_grid_leaves_out_what_changes_nothing() -> None:
    pytest.importorskip("triton")
    module = bench.generated("kda")
    given = {"BK": (16,), "BV": (8,), "warps": (2,), "stages": (5,), "registers": (96,)}
    for name in bench.kernels_of(module):
        table = module._CONFIGS[0][-1]
        own = tuple(table[bench.table_key(name, list(table))])
        first, *rest = tune.grid_of(getattr(module, name), own, given)
        relevant = tune.matters(getattr(module, name), own)
        assert first == own
        assert rest == [tuple(given[f][0] if relevant[f] else n for f, n in zip(tune.fields(own), own, strict=True))]


def test_the_suggestion_adds_up_over_kernels() -> None:
    """`prepare` is one entry for two kernels; the second does not use BV, so it has no say in it."""
    table = {"prepare": (64, 64, 4, 1)}

    def row(kernel: str, entry: tuple[int, ...], ms: float, **more: str) -> dict:
        return {"kernel": kernel, "entry": list(entry), "ms": ms, **more}

    rows = [
        row("_forward_prepare", (64, 64, 4, 1), 3.0),
        row("_forward_prepare", (64, 32, 8, 1), 1.0),
        row("_forward_prepare", (64, 64, 8, 1), 2.9),
        row("_forward_prepare", (64, 32, 4, 1), 0.1, error="wrong"),
        row("_backward_prepare", (64, 64, 4, 1), 2.0),
        row("_backward_prepare", (64, 64, 8, 1), 2.5),
    ]
    assert tune.suggested(rows, table) == {"prepare": (64, 32, 8, 1)}


@pytest.mark.parametrize(("change", "rr", "most"), [(0.0, 0.0, 0.0), (0.5, 0.125, 0.5), (float("nan"), None, None)])
def test_distance(change: float, rr: float | None, most: float | None) -> None:
    want = torch.ones(4, 4)
    got = want.clone()
    got[1, 2] += change
    expected = (float("inf"), float("inf")) if rr is None else (rr, most)
    assert tune.distance(got, want) == pytest.approx(expected)


def test_tuning_in_the_interpreter(tmp_path: Path) -> None:
    """The launches replayed one by one, on the CPU: right answers, a time for each configuration."""
    pytest.importorskip("triton")
    command = [sys.executable, str(BENCHMARKS / "tune.py"), "--out", str(tmp_path), "--device", "cpu"]
    command += ["--dtype", "float32", "--variant", "gdn", "--shape", "1,20,1", "--K", "16", "--V", "20"]
    command += ["--kernels", "scan", "--grid", "BV=16", "warps=4", "stages=2"]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "tune-gdn.json").read_text())
    assert {row["kernel"] for row in result["rows"]} == {"_forward_scan", "_backward_scan"}
    assert not [row for row in result["rows"] if "error" in row]
    assert all(row["rr"] < 1e-5 and row["ms"] > 0 for row in result["rows"])
    assert result["whole"]["table"]["row"]["failures"] == []


def test_one_token_is_the_recurrence() -> None:
    """The formulas that judge 16-bit operands are those of the float64 loop while nothing is rounded."""
    given = make("kda", 2, 1, 3, 6, 12, 20, torch.float32, regime="mild", seed=3)
    ref = metrics.reference("kda", *given)
    found = one_token.gradients(*given, False)
    dq = found["dq"].view(2, 3, 2, 12).sum(2)
    assert metrics.rr(dq, ref["dq"][:, 0]) < 1e-12
    assert metrics.rr(found["dbeta"], ref["dbeta"][:, 0]) < 1e-12
    rounded = one_token.gradients(*given, True)
    assert 1e-5 < metrics.rr(rounded["dbeta"], found["dbeta"]) < 2e-2
