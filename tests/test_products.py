"""Which products take an operand in two parts: the inverse, values that it gives or meets, sums over V."""

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


def _calls(name: str, side: str = "") -> list[tuple[str, str, list[str]]]:
    """(first, second operand without transpositions, whether each comes in parts), a product of the file each."""
    found = []
    ahead, back = codegen.render(VARIANTS[name]).split("# Triton: backward")
    ahead = ahead.split("# Triton: forward")[1]
    for fine, inner in CALL.findall({"forward": ahead, "backward": back}.get(side, ahead + back)):
        x, y, *rest = _arguments(inner)
        x, y = (re.sub(r"tl\.trans\((\w+)\)", r"\1", t) for t in (x, y))
        found.append((x, y, rest[2:] if fine else ["False", "False"]))
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
    assert {t for x, y, _ in calls for t in (x, y)} & values
    for x, y, parts in calls:
        for operand, part in zip((x, y), parts, strict=True):
            assert operand not in inverses or part == "True", (x, y)
            assert operand not in values or part != "False", (x, y)


def test_kda_names_the_operands() -> None:
    """The inverse; dVnew where it meets it; Vnew and dVnew where they are added to a state. The rest by FINE."""
    split = [call for call in _calls("kda") if call[2] != ["False", "False"]]
    assert split.count(("KT", "Vnew", ["False", "True"])) == 2  # the forward's state and the backward's
    assert ("E", "dVnew", ["True", "True"]) in split
    assert ("Aqk", "Vnew", ["False", "FINE"]) in split
    assert ("do", "Vnew", ["False", "FINE"]) in split
    assert ("Vnew", "dS", ["FINE", "False"]) in split
    assert [parts for x, y, parts in split if y == "dVnew"] == [["False", "True"], ["True", "True"]]
    assert len(split) == 13


@pytest.mark.parametrize("name", PLAIN)
def test_where_nothing_is_solved_only_sums_over_values_are_split(name: str) -> None:
    """dAqk, a sum over V, meets keys and queries in plain products where the decay is one number a head."""
    split = [parts for _, _, parts in _calls(name) if parts != ["False", "False"]]
    assert split == [["FINE", "False"]] * (2 if name == "simple_gla" else 0)


@pytest.mark.parametrize("name", SOLVING)
def test_what_the_inverse_meets_crosses_launches_in_float32(name: str) -> None:
    """The inverse itself, the cotangent of the values that it gave, and the part of it that another launch made."""
    plan = codegen.plans(VARIANTS[name]).backward
    crossing = {n for kernel in plan.kernels for n in kernel.loads}
    products = [m for m in plan.program.nodes() if m.op == "matmul" and any(_inverses(a) for a in m.args)]
    met = [n for n in crossing if n.op == "add" and n.axes == ("C", "V") and any(n in m.args for m in products)]
    assert met
    parts = [n for n in crossing if n.axes == ("C", "V") and any(n in m.args for m in met)]
    assert parts
    for n in (*met, *parts, *filter(_inverses, crossing)):
        assert codegen.storage(n, plan) == "float32", plan.names[n]
