"""docs/robustness.md names tests and checks that exist, and every check is named there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import contract

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "robustness.md").read_text(encoding="utf-8")


def functions(path: Path) -> set[str]:
    return {n.name for n in ast.parse(path.read_text(encoding="utf-8")).body if isinstance(n, ast.FunctionDef)}


def test_every_name_exists() -> None:
    for file, name in re.findall(r"`(tests/\w+\.py)::(\w+)`", PAGE):
        assert name in functions(ROOT / file), f"{file}::{name}"
    checks = {f.__name__ for f in contract.CHECKS}
    assert set(re.findall(r"`contract\.(?!NAME)(\w+)`", PAGE)) <= checks
    assert set(re.findall(r"`gpu\.(?!NAME)(\w+)`", PAGE)) <= functions(ROOT / "benchmarks" / "check_contract.py")


def test_every_row_is_held_by_something() -> None:
    rows = [line for line in PAGE.splitlines() if re.match(r"\| [\w.-]+#\d+", line)]
    assert len(rows) > 50
    held = re.compile(r"tests/\w+\.py::|contract\.\w+|gpu\.\w+|check_gpu\.py|does not apply|the same|distinct in every")
    assert [line for line in rows if not held.search(line)] == []


def test_every_check_is_named() -> None:
    named = set(re.findall(r"`contract\.(\w+)`", PAGE))
    known_otherwise = {"growing_gates", "repeats", "causal"}
    assert {f.__name__ for f in contract.CHECKS} - named == known_otherwise
