"""An operation that the language does not have: registered with its derivative and used, no template touched."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path

import bindings
import pytest
import torch
from bindings import Sizes
from interpreted import run_files

import dplrgen
from dplrgen import Variant, autodiff, codegen, ir
from dplrgen.errors import IRError
from dplrgen.ir import Node, Op, exp, gate, key, node, value

torch.set_num_threads(1)
pytestmark = pytest.mark.usefixtures("cache")

TORCH = "torch.tanh({0})"
TRITON = "(2.0 * tl.sigmoid(2.0 * {0}) - 1.0)"
SIZES = Sizes(B=2, T=71, H=1, HV=2, K=6, V=5)


def tanh(x: Node) -> Node:
    return node("tanh", x)


def register_tanh(torch_text: str = TORCH) -> None:
    """Three lines: the op itself, and below it in `vjp` what its derivative is."""
    same_axes = lambda operands, attrs: operands[0]  # noqa: E731
    ir.register(Op("tanh", 1, same_axes, "tanh({0})", torch_text, TRITON, at_zero=lambda x, **attrs: math.tanh(x)))


def vjp(n: Node, d: Node) -> tuple[Node]:
    return (d * (1.0 - n * n),)


@pytest.fixture
def language(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Registers tanh in every table, and takes it out again."""
    register_tanh()
    monkeypatch.setitem(autodiff.VJP, "tanh", vjp)
    monkeypatch.setitem(bindings.MEANING, "tanh", torch.tanh)
    yield register_tanh
    ir.OPS.pop("tanh", None)


def squashed() -> Variant:
    """tanh at every place: of a head's gate, of channels, of values, in the decay and under a product over channels."""
    q, k, v, g, beta = key("q"), key("k"), value("v"), gate("g", "K"), gate("beta")
    return Variant(
        name="squashed",
        inputs=(q, k, v, g, beta),
        decay=exp(tanh(g)),
        a=tanh(k),
        b=tanh(beta) * tanh(k),
        k=tanh(k),
        v=tanh(v) * tanh(ir.dot(tanh(k), k)),
    )


@pytest.mark.usefixtures("language")
def test_values_and_gradients() -> None:
    variant = squashed()
    given = bindings.make_inputs(variant, SIZES)
    got = bindings.run(dplrgen.build(variant), variant, given)
    assert not bindings.differences(got, bindings.reference(variant, given), 1e-10)


@pytest.mark.usefixtures("language")
def test_kernels_in_the_interpreter(tmp_path: Path) -> None:
    variant = squashed()
    given = bindings.make_inputs(variant, Sizes(B=1, T=35, H=1, HV=2, K=20, V=18), torch.float32)
    (got,) = run_files([(variant, given)], tmp_path)
    assert not isinstance(got, str), got
    assert not bindings.differences(got, bindings.reference(variant, given), 1e-4)


@pytest.mark.usefixtures("language")
def test_folds_see_through_it() -> None:
    """A rule looks at identity of expressions: a is k, whatever k is."""
    text = codegen.render(squashed())
    assert "tanh" in text
    assert not any("tanh" in path.read_text() for path in codegen.TEMPLATES.glob("*.j2"))


def test_another_meaning_is_another_operator(language: Callable[..., None]) -> None:
    """What an operation prints is a part of the program that the operator's name stands for."""
    variant = squashed()
    given = bindings.make_inputs(variant, SIZES)
    before = bindings.run(dplrgen.build(variant), variant, given)
    del ir.OPS["tanh"]
    language("torch.sin({0})")
    after = bindings.run(dplrgen.build(variant), variant, given)
    assert bindings.differences(after, before, 1e-3)


def test_without_a_derivative_rule_it_is_refused(language, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(autodiff.VJP, "tanh")
    with pytest.raises(IRError, match=r"'tanh' has no derivative rule: tanh\("):
        dplrgen.build(squashed().renamed("squashed_without_a_rule"))


@pytest.mark.usefixtures("language")
def test_a_name_is_registered_once() -> None:
    with pytest.raises(IRError, match="'tanh' is already registered"):
        register_tanh()


def test_the_language_is_as_before() -> None:
    assert "tanh" not in ir.OPS
    assert "tanh" not in autodiff.VJP
    with pytest.raises(IRError, match="unknown op 'tanh'"):
        tanh(key("k"))
