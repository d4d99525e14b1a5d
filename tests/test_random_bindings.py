"""Bindings drawn at random, compiled and compared with a token loop: values, gradients, and which folds fire.

The generated PyTorch runs in float64; a tenth of the bindings also run their Triton kernels in the interpreter.
"""

from __future__ import annotations

import sys
from pathlib import Path

import bindings
import pytest
import torch
from bindings import Drawn, Sizes
from interpreted import run_files

import dplrgen
from dplrgen import Variant, pipeline
from dplrgen.ir import Node, const, dot, exp, gate, key, log, minimum, norm, sigmoid, topological, value
from dplrgen.passes import count

torch.set_num_threads(1)

SEEDS = range(200)
INTERPRETED = SEEDS[:180:9]
PER_PROCESS = 5

pytestmark = pytest.mark.usefixtures("cache")


def sizes_of(seed: int, chunk: int) -> Sizes:
    """Two whole chunks and an odd tail; two value heads a key head for every other seed."""
    heads = 1 + seed % 3 // 2
    tail = 1 + 2 * (seed % (chunk // 2))
    return Sizes(B=1 + seed % 2, T=2 * chunk + tail, H=heads, HV=heads * (1 + seed // 2 % 2), K=5 + seed % 4, V=3)


def fired(drawn: Drawn) -> frozenset[str]:
    stages = pipeline.forward(drawn.variant)
    return frozenset(f.rule for stage in stages for f in stage.fired) & bindings.FOLDS


@pytest.mark.parametrize("seed", SEEDS)
def test_values_and_gradients(seed: int) -> None:
    drawn = bindings.draw(seed)
    op = dplrgen.build(drawn.variant)
    chunk = sys.modules[op.__module__]._chunk_size(8, torch.float64, False)
    given = bindings.make_inputs(drawn.variant, sizes_of(seed, chunk), seed=seed)
    got, want = bindings.run(op, drawn.variant, given), bindings.reference(drawn.variant, given)
    assert not bindings.differences(got, want, 1e-10), (drawn.kind, drawn.variant.binding())


@pytest.mark.parametrize("seed", SEEDS)
def test_folds_fire_exactly_where_they_should(seed: int) -> None:
    drawn = bindings.draw(seed)
    assert fired(drawn) == drawn.folds, (drawn.kind, drawn.variant.binding())
    assert count(pipeline.forward(drawn.variant)[-1].program)["products"] == drawn.products


def test_the_draw_covers_every_kind() -> None:
    drawn = [bindings.draw(seed) for seed in SEEDS]
    kinds = {d.kind for d in drawn}
    assert len(kinds) == 16, sorted(kinds)
    for fold in bindings.FOLDS:
        assert 10 <= sum(fold in d.folds for d in drawn) <= 190, fold
    operations = {n.op for d in drawn for n in bindings.topological(d.variant.streams().values())}
    assert operations == {*bindings.MEANING, "input", "const"}
    twice = [bindings.draw(seed) for seed in SEEDS]
    assert [d.variant for d in twice] == [d.variant for d in drawn]


X, G, E = gate("x", "K"), gate("g", "K"), gate("e", "K")
#: Decays that reach 0: by an exponential, by a factor that is 0, by both.
REACH_0 = {
    "exp(g) e": exp(G) * E,
    "e": E,
    "sigmoid(x)": sigmoid(X),
    "1 - sigmoid(x)": 1.0 - sigmoid(X),
    "sigmoid(x) exp(g)": sigmoid(X) * exp(G),
    "sigmoid(x)^2": sigmoid(X) * sigmoid(X),
    "exp(g) / (1 + e)": exp(G) / (1.0 + E),
    "exp(min(g, log sigmoid(x)))": exp(minimum(G, log(sigmoid(X)))),
}


def reaching_0(decay: Node) -> Variant:
    q, k, v, beta = key("q"), key("k"), value("v"), gate("beta")
    gates = tuple(n for n in (G, X, E) if n in topological([decay]))
    return Variant(name="reaching", inputs=(q, k, v, *gates, beta), decay=decay, a=k, b=beta * k, k=k, v=beta * v)


def hard_gates(variant: Variant, given: bindings.Inputs) -> bindings.Inputs:
    """Single tokens and channels whose decay underflows, and next to them some whose does not."""
    hard = {"g": (-90.0, -200.0, -1e4), "x": (-100.0, 100.0, -1e4), "e": (0.0, 1.0, 0.0)}
    with torch.no_grad():
        for n, x in zip(variant.inputs, given.streams, strict=True):
            for i, extreme in enumerate(hard.get(n.attr("name"), ())):
                x[:, 3 + 4 * i :: 11, :, i::2] = extreme
    return given


@pytest.mark.parametrize("decay", REACH_0)
def test_decays_that_reach_0(decay: str) -> None:
    variant = reaching_0(REACH_0[decay])
    given = hard_gates(variant, bindings.make_inputs(variant, Sizes(B=1, T=75, H=1, HV=2, K=6, V=3), seed=3))
    got, want = bindings.run(dplrgen.build(variant), variant, given), bindings.reference(variant, given)
    assert all(torch.isfinite(x).all() for x in got.values())
    inputs = {n.attr("name"): x for n, x in zip(variant.inputs, given.streams, strict=True)}
    for name, ref in want.items():
        # The logarithm of a gate that is 0 is given the derivative 0; that of sigmoid(-1e4) is lost to autograd.
        there = ref.isfinite() & (inputs["e"] != 0 if name == "de" else True)
        got[name], want[name] = (torch.where(there, x, 0.0) for x in (got[name], ref))
    assert not bindings.differences(got, want, 1e-10), variant.binding()


def test_decays_that_reach_0_in_the_interpreter(tmp_path: Path) -> None:
    cases = []
    for decay in ("exp(g) e", "1 - sigmoid(x)", "sigmoid(x) exp(g)"):
        variant = reaching_0(REACH_0[decay])
        given = bindings.make_inputs(variant, Sizes(B=1, T=35, H=1, HV=1, K=20, V=18), torch.float32, 4)
        cases.append((variant, hard_gates(variant, given)))
    for (variant, given), result in zip(cases, run_files(cases, tmp_path), strict=True):
        want = bindings.reference(variant, given)
        assert not isinstance(result, str), result
        for x in (result, want):
            x.pop("de", None)
        assert not bindings.differences(result, want, 1e-4), variant.binding()


def _crossing() -> dict[str, Variant]:
    """One input's gradient is a term of another's, or is read beside a sum over V, across launches."""
    q, k, j, v, e = key("q"), key("k"), key("j"), value("v"), gate("e", "K")
    still = {"decay": const(1.0), "k": k}
    given = (j, k, q, v)
    return {
        "norm": Variant(name="crossing_norm", inputs=given, a=k, b=const(0.0), v=norm(j + k) * v, **still),
        "dot": Variant(name="crossing_dot", inputs=given, a=k, b=0.5 * k, v=dot(j + 0.2 * k, q) * v, **still),
        "gate": Variant(name="crossing_gate", inputs=(*given, e), a=k, b=e * k, v=dot(j + k, e) * v, **still),
        "spread": Variant(
            name="crossing_spread", inputs=(v, q, k), decay=const(1.0), a=q, b=const(0.0), k=q, v=v + dot(k, const(0.3))
        ),
    }


def test_gradients_that_cross_launches(tmp_path: Path) -> None:
    cases = []
    for variant in _crossing().values():
        sizes = Sizes(B=1, T=35, H=1, HV=2, K=20, V=18)
        given = bindings.make_inputs(variant, sizes, seed=5)
        got, want = bindings.run(dplrgen.build(variant), variant, given), bindings.reference(variant, given)
        assert not bindings.differences(got, want, 1e-10), variant.binding()
        cases.append((variant, bindings.make_inputs(variant, sizes, torch.float32, 5)))
    for (variant, given), result in zip(cases, run_files(cases, tmp_path), strict=True):
        assert not isinstance(result, str), result
        assert not bindings.differences(result, bindings.reference(variant, given), 1e-4), variant.binding()


def _signed() -> list[Variant]:
    """Signs and factors between a product and the state it is added to; I + N saved for the backward."""
    q, k, v, g, beta = key("q"), key("k"), value("v"), gate("g"), gate("beta")
    given = {"inputs": (q, k, v, g), "decay": exp(g), "a": k, "v": v}
    return [
        Variant(name="signed_k", b=const(0.0), k=-k, **given),
        Variant(name="signed_v", b=const(0.0), k=k, **{**given, "v": -v}),
        Variant(name="signed_erase", b=k, k=-k, **given),
        Variant(name="signed_factor", b=k, k=-(beta * k), **{**given, "inputs": (q, k, v, g, beta)}),
    ]


def test_signs_and_factors_of_what_a_state_is_given(tmp_path: Path) -> None:
    sizes = Sizes(B=1, T=35, H=1, HV=2, K=20, V=18)
    cases = [(variant, bindings.make_inputs(variant, sizes, torch.float32, 6)) for variant in _signed()]
    for (variant, given), result in zip(cases, run_files(cases, tmp_path), strict=True):
        assert not isinstance(result, str), result
        assert not bindings.differences(result, bindings.reference(variant, given), 1e-4), variant.binding()


@pytest.mark.parametrize("group", range(len(INTERPRETED) // PER_PROCESS))
def test_kernels_in_the_interpreter(group: int, tmp_path) -> None:
    """Sizes off the powers of two, so that what expressions hold in the padding of a tile shows."""
    cases = []
    for seed in INTERPRETED[group * PER_PROCESS : (group + 1) * PER_PROCESS]:
        variant = bindings.draw(seed).variant
        heads = 1 + seed % 2
        sizes = Sizes(B=1, T=35, H=1, HV=heads, K=20, V=18)
        cases.append((variant, bindings.make_inputs(variant, sizes, torch.float32, seed)))
    failures = {
        variant.name: result if isinstance(result, str) else bindings.differences(result, want, 1e-4)
        for (variant, given), result in zip(cases, run_files(cases, tmp_path), strict=True)
        if (want := bindings.reference(variant, given))
    }
    assert not any(failures.values()), failures
