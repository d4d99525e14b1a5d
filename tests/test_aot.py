"""Every kernel compiles for GPUs that are not here and fits them; the table in benchmarks/results is of these kernels.

Compiled here at K = V = 64 in bfloat16, and dplr in float16, so that it takes minutes; the table holds the rest, and
its digests say whether it was made from the files in generated/.
"""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
from triton.runtime.jit import JITFunction


def _tool() -> ModuleType:
    path = Path(__file__).parents[1] / "benchmarks" / "aot.py"
    spec = importlib.util.spec_from_file_location("aot", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["aot"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


aot = _tool()

EVERY_TARGET = ("kda", "dplr")
CASES = [(v, "sm_90", "bfloat16") for v in aot.variants()]
CASES += [(v, t, "bfloat16") for v in EVERY_TARGET for t in aot.TARGETS if t != "sm_90"]
CASES += [("dplr", t, "float16") for t in ("sm_90", "gfx942")]  # the most shared memory, the least there is

#: What the table must hold, for every operator.
COVERED = [(t, dtype, size) for t in aot.TARGETS for dtype in ("bfloat16", "float32") for size in (64, 128)]
COVERED += [("sm_90", "float16", size) for size in (64, 128)]

#: Bytes of stack a thread in bfloat16 at K = V = 128 on sm_90; more needs a reason, by operator and kernel.
STACK = 1024
_FOUR = "products of four streams share one tree's decays; 8 warps spill less and were slower on an H200"
_TREES = "four trees in one walk; with 4 warps twice as much, and dplr was slower on an H200"
_CLIP = "three walks over the keys: the clip's two norms, their difference, and the products"
REASONS: dict[tuple[str, str], str] = {
    (variant, kernel): _FOUR
    for variant in ("dplr", "dplr_absorbed", "rwkv7")
    for kernel in ("forward_prepare", "forward_prepare_1")
}
REASONS |= {(variant, "backward_finish_1"): _TREES for variant in ("dplr_absorbed", "rwkv7")}
REASONS |= {("gdn2_clipped", kernel): _CLIP for kernel in ("forward_prepare", "forward_prepare_1", "backward_finish_1")}

#: What a target cannot hold, in bfloat16: (operator, kernel, target, K = V). Known faults, named in the README; a row
#: that comes to fit must go, one that ceases to fit fails.
TOO_LARGE: set[tuple[str, str, str, int]] = set()


@pytest.mark.parametrize(("variant", "target", "dtype"), CASES, ids=["-".join(case) for case in CASES])
def test_kernels_compile_and_fit(variant: str, target: str, dtype: str) -> None:
    case = aot.Case(variant, target, dtype, 64)
    done = [aot.outcome(case, i) for i in range(len(aot.launches(case)))]
    assert [x for x in done if x.kernel.startswith("forward")]
    assert [x for x in done if x.kernel.startswith("backward")]
    assert not [aot.as_line(x) for x in done if x.row is None]
    assert not [aot.as_line(x) for x in done if not aot.fits(x.row)]
    assert not [aot.as_line(x) for x in done if x.row.products and not x.row.matrix]
    assert any(x.row.products for x in done)


@pytest.mark.parametrize("variant", aot.variants())
def test_no_kernel_is_left_out(variant: str) -> None:
    """Each function of the file that asks which program it is gets launched in some case that the table covers."""
    cases = [aot.Case(variant, *where) for where in COVERED]
    launched = {x.kernel.__name__ for case in cases for x in aot.launches(case)}
    functions = [x for x in vars(aot.load(variant)).values() if isinstance(x, JITFunction)]
    assert launched == {x.__name__ for x in functions if "tl.program_id" in x.src}


@pytest.mark.parametrize(("variant", "kernel"), [("delta", "forward_scan"), ("kda", "backward_reverse")])
def test_tiles_of_a_scan_run_ahead(variant: str, kernel: str) -> None:
    """Copied to shared memory at earlier chunks: `delta`'s keys, read as given, and KDA's part of dVnew, added."""
    case = aot.Case(variant, "sm_90", "bfloat16", 128)
    launch = next(x for x in aot.launches(case) if x.label == kernel)
    loop = aot.compiled(launch, aot.TARGETS["sm_90"]).asm["ttgir"].split("scf.for", 1)[1].split("scf.yield")[0]
    assert re.search(r"async_copy_global_to_local .*: tensor<64x128x", loop)
    assert not re.findall(r"tt\.load .*: tensor<\d+x\d+x", loop)


def test_table_is_of_these_kernels() -> None:
    operators = aot.read().operators
    assert set(operators) == {aot.load(v)._NAME for v in aot.variants()}, "stale: run `make aot`"


@pytest.mark.parametrize("variant", aot.variants())
def test_table_is_complete(variant: str) -> None:
    rows = aot.read().operators.get(aot.load(variant)._NAME, ())
    there = {(r.target, r.dtype, r.size, r.kernel) for r in rows}
    cases = [aot.Case(variant, *where) for where in COVERED]
    assert not {(c.target, c.dtype, c.size, x.label) for c in cases for x in aot.launches(c)} - there, "run `make aot`"


def test_what_the_table_says_fits() -> None:
    rows = [(name, r) for name, rows in aot.read().operators.items() for r in rows]
    assert rows
    named = {aot.load(v)._NAME: v for v in aot.variants()}
    assert {(named[n], r.kernel, r.target, r.size) for n, r in rows if not aot.fits(r)} == TOO_LARGE
    assert not [(name, r) for name, r in rows if aot.fits(r) and r.dtype == "bfloat16" and r.products and not r.matrix]


def test_stack_is_small_or_has_a_reason() -> None:
    """A reason whose kernel has come within the bound goes."""
    named = {aot.load(v)._NAME: v for v in aot.variants()}
    rows = [(named.get(name, name), r) for name, rows in aot.read().operators.items() for r in rows]
    held = [(v, r) for v, r in rows if (r.target, r.dtype, r.size) == ("sm_90", "bfloat16", 128)]
    assert held
    deep = {(v, r.kernel): r.stack for v, r in held if r.stack > STACK}
    assert deep.keys() == REASONS.keys(), deep


def _row(**changes: object) -> object:
    given = {"kernel": "scan", "target": "sm_90", "dtype": "bfloat16", "size": 64, "registers": 100, "stack": 0}
    return aot.Row(**{**given, "shared": 1024, "tensor": 0, "products": 1, "matrix": {"wgmma": 4}, **changes})


def test_a_table_reads_back(tmp_path: Path) -> None:
    table = aot.Table({"triton": "0"}, {"kda_0": (_row(), _row(target="gfx942", matrix={})), "gla_1": (_row(),)})
    path = tmp_path / "aot.json"
    path.write_text(aot.as_json(table))
    assert aot.read(path) == table
    assert aot.read(tmp_path / "none.json") == aot.Table()
    assert "| scan | bfloat16 | 64 | 100, 1K, 4 wgmma | 100, 1K |" in aot.as_page(table)


def test_new_rows_replace_old_ones_and_stale_operators_go() -> None:
    old = aot.Table({"triton": "0"}, {"kda_0": (_row(), _row(kernel="finish")), "gla_1": (_row(),), "gdn_2": (_row(),)})
    new = aot.Table({"triton": "0"}, {"kda_0": (_row(registers=90),)})
    both = aot.merged(old, new, ["kda_0", "gla_1", "gdn_3"])
    assert both.operators == {"gla_1": (_row(),), "kda_0": (_row(registers=90), _row(kernel="finish"))}
    other = aot.Table({"triton": "1"}, new.operators)
    assert aot.merged(old, other, ["kda_0", "gla_1"]) == other


def test_what_a_target_lacks_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    assert aot.fits(_row(shared=227 * 1024))
    assert not aot.fits(_row(shared=227 * 1024 + 1))
    assert not aot.fits(_row(target="gfx942", shared=64 * 1024 + 1))
    assert aot.fits(_row(target="sm_100", tensor=512))
    assert not aot.fits(_row(target="sm_100", tensor=513))

    def refuse(*_: object) -> None:
        raise RuntimeError("no such instruction\nand a dump")

    assert (
        aot.brief(RuntimeError("failed\nlog:\nptxas fatal: no registers\n"))
        == "RuntimeError: ptxas fatal: no registers"
    )
    assert aot.brief(RuntimeError()) == "RuntimeError: "

    monkeypatch.setattr(aot, "compiled", refuse)
    got = aot.outcome(aot.Case("kda", "sm_80", "bfloat16", 64), 0)
    assert (got.row, got.error) == (None, "RuntimeError: no such instruction")


def test_launches_are_noted_as_the_target_makes_them() -> None:
    """float32 gates ask for three parts; where there is less shared memory, scans keep fewer chunks in flight."""
    module = aot.load("kda")
    before = module._launch, module._setting, module._shared_memory
    noted = {t: aot.launches(aot.Case("kda", t, "mixed", 128)) for t in aot.TARGETS}
    assert (module._launch, module._setting, module._shared_memory) == before
    for launches in noted.values():
        assert len({x.label for x in launches}) == len(launches)
        assert {x.options["GATE_PARTS"] for x in launches if "GATE_PARTS" in x.options} == {3}
    stages = {t: sum(x.options["num_stages"] for x in launches) for t, launches in noted.items()}
    assert stages["sm_90"] > stages["sm_80"] > stages["gfx942"]
