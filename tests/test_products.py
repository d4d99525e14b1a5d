"""Which products of the kernels take an operand in two parts: those with the inverse, and with what it gives tokens."""

from __future__ import annotations

import re

import pytest

from dplrgen import codegen, variants

SOLVING = [v for v in variants.VARIANTS if v not in ("gla", "simple_gla")]
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


def _calls(name: str) -> list[tuple[bool, list[str]]]:
    text = codegen.render(variants.get(name))
    return [(bool(fine), _arguments(inner)) for fine, inner in CALL.findall(text)]


@pytest.mark.parametrize("name", SOLVING)
def test_the_inverse_and_its_values_come_in_two_parts(name: str) -> None:
    """No plain product reads E, the values after the delta rule or their cotangent beside E."""
    calls = _calls(name)
    assert any(fine for fine, _ in calls)
    for fine, (x, y, *rest) in calls:
        plain = {
            re.sub(r"tl\.trans\((\w+)\)", r"\1", t)
            for t, flag in ((x, 0), (y, 1))
            if not fine or rest[3 + flag] == "False"
        }
        assert not plain & {"E", "Vnew"}, (x, y)


def test_kda_names_the_operands() -> None:
    """(I + N)^-1 in front of keys, values and dVnew; Vnew in outputs, states, dA and dK; E^T dVnew in what follows."""
    fine = [
        (re.sub(r"tl\.trans\((\w+)\)", r"\1", x), re.sub(r"tl\.trans\((\w+)\)", r"\1", y))
        for f, (x, y, *_) in _calls("kda")
        if f
    ]
    assert fine.count(("KT", "Vnew")) == 2  # the forward's state and the backward's
    assert ("Aqk", "Vnew") in fine
    assert ("do", "Vnew") in fine
    assert ("Vnew", "dS") in fine
    assert ("E", "dVnew") in fine
    assert len(fine) == 12


@pytest.mark.parametrize("name", ["gla", "simple_gla"])
def test_where_nothing_is_solved_no_product_is_split(name: str) -> None:
    assert not [1 for fine, _ in _calls(name) if fine]
