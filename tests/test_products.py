"""Which products of the kernels take an operand in two parts: those with the inverse, and with what it gives tokens."""

from __future__ import annotations

import re

import pytest

from dplrgen import codegen
from dplrgen.ir import Node, topological
from dplrgen.variants import VARIANTS

PLAIN = ("gla", "simple_gla")
SOLVING = [v for v in VARIANTS if v not in PLAIN]
CALL = re.compile(r"_dot(_fine)?\((.*)\)$", re.MULTILINE)


def _arguments(text: str) -> list[str]:
    """The arguments of a call, split at its own commas."""
    depth, parts = 0, [""]
    for c in text:
        depth += (c == "(") - (c == ")")
        if c == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += c
    return [p.strip() for p in parts]


def _calls(name: str, side: str = "") -> list[tuple[bool, str, str, list[bool]]]:
    """(in parts, first, second operand without transpositions, which of them are split), a product of the file each."""
    found = []
    ahead, back = codegen.render(VARIANTS[name]).split("# Triton: backward")
    for fine, inner in CALL.findall({"forward": ahead, "backward": back}.get(side, ahead + back)):
        x, y, *rest = _arguments(inner)
        x, y = (re.sub(r"tl\.trans\((\w+)\)", r"\1", t) for t in (x, y))
        found.append((bool(fine), x, y, [t == "True" for t in rest[3:]] if fine else [False, False]))
    return found


def _inverses(n: Node) -> bool:
    """(I + N)^-1 itself, or with rows or columns scaled."""
    if n.axes != ("C", "C"):
        return False
    own = "inverse" in (n.op, dict(n.attrs).get("of"))
    return own or (n.op in ("mul", "columns", "neg") and any(_inverses(a) for a in n.args))


def _named(name: str, side: str) -> tuple[set[str], set[str]]:
    """Names of the inverses, and of sums that a product with one goes into: the values after the delta rule."""
    plan = getattr(codegen.plans(VARIANTS[name]), side)
    inverses, values = set(), set()
    solved = [n for n in plan.program.nodes() if n.op == "matmul" and any(_inverses(a) for a in n.args)]
    for n in plan.program.nodes():
        if _inverses(n) and n in plan.names:
            inverses.add(plan.names[n])
        if n.op == "add" and n.axes == ("C", "V") and n in plan.names:
            near = {m for m in topological([n]) if m in solved and m.axes == ("C", "V")}
            if any(m in n.args or any(m in a.args for a in n.args if a.op == "neg") for m in near):
                values.add(plan.names[n])
    return inverses, values


@pytest.mark.parametrize("side", ["forward", "backward"])
@pytest.mark.parametrize("name", SOLVING)
def test_the_inverse_and_its_values_come_in_two_parts(name: str, side: str) -> None:
    inverses, values = _named(name, side)
    assert inverses
    assert values
    calls = _calls(name, side)
    assert {t for _, x, y, _ in calls for t in (x, y)} & values
    for _, x, y, split in calls:
        whole = {t for t, parts in zip((x, y), split, strict=True) if not parts}
        assert not whole & (inverses | values), (x, y)


def test_kda_names_the_operands() -> None:
    """(I + N)^-1 in front of keys, values and dVnew; Vnew in outputs, states, dA and dK; E^T dVnew in what follows."""
    fine = [(x, y, split) for in_parts, x, y, split in _calls("kda") if in_parts]
    assert fine.count(("KT", "Vnew", [False, True])) == 2  # the forward's state and the backward's
    assert ("Aqk", "Vnew", [False, True]) in fine
    assert ("do", "Vnew", [False, True]) in fine
    assert ("Vnew", "dS", [True, False]) in fine
    assert ("E", "dVnew", [True, True]) in fine
    assert len(fine) == 12


@pytest.mark.parametrize("name", PLAIN)
def test_where_nothing_is_solved_no_product_is_split(name: str) -> None:
    assert not [1 for in_parts, *_ in _calls(name) if in_parts]
