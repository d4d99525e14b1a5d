"""The shape of the package: which module may import which, what is public, and that generated files are fresh.

The tests read source text; what they say is true of any machine.
"""

from __future__ import annotations

import ast
import builtins
import functools
import importlib
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from inputs import make

import dplrgen
from dplrgen import cli, codegen, compile_hook, ops, passes
from dplrgen.ir import Node, leaf, substitute
from dplrgen.variants import VARIANTS, Variant

torch.set_num_threads(1)

PACKAGE = Path(dplrgen.__file__).parent
GENERATED = PACKAGE.parent / "generated"
TEMPLATES = PACKAGE / "templates"

#: A module may import those before it. `dplrgen` is the package itself, which imports nothing until it is asked.
ORDER = [
    *("dplrgen", "errors", "ir", "variants", "passes", "autodiff", "pipeline", "schedule", "codegen", "compile_hook"),
    *("ops", "interpret", "explain", "picture", "verify", "doctor", "cli", "__main__"),
]

#: Modules that may import torch. The others are usable where it is absent and never import one of these at the top.
WITH_TORCH = {"interpret", "ops", "verify", "doctor"}

PUBLIC = ["VARIANTS", "Variant", "__version__", "build", "ops"]

MODULES = [name for name in ORDER if name != "dplrgen"]
INPUTS = {str(n.attr("name")) for variant in VARIANTS.values() for n in variant.inputs}
#: Every operator has them, and they give its shapes.
SHAPE_GIVING = {"q", "v"}


@functools.cache
def parsed(module: str) -> ast.Module:
    path = PACKAGE / ("__init__.py" if module == "dplrgen" else f"{module}.py")
    return ast.parse(path.read_text(encoding="utf-8"))


def imports(tree: ast.AST, deep: bool) -> Iterator[str]:
    """Full names of what is imported at the top, or anywhere if ``deep``; for types alone too."""
    for n in ast.walk(tree) if deep else top_level(tree):
        if isinstance(n, ast.Import):
            yield from (alias.name for alias in n.names)
        elif isinstance(n, ast.ImportFrom):
            assert n.level == 0, f"line {n.lineno}: relative import"
            yield from (f"{n.module}.{alias.name}" for alias in n.names)


def top_level(tree: ast.AST) -> Iterator[ast.AST]:
    """Nodes outside functions."""
    for child in ast.iter_child_nodes(tree):
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield child
            yield from top_level(child)


def own(names: Iterator[str]) -> set[str]:
    """The modules of the package among imported names."""
    parts = [name.split(".") for name in names if name.split(".")[0] == "dplrgen"]
    return {p[1] if len(p) > 1 and p[1] in ORDER else "dplrgen" for p in parts}


# ---------------------------------------------------------------------------------------------------------------------
# Imports


def test_every_module_has_its_place() -> None:
    assert {path.stem for path in PACKAGE.glob("*.py")} - {"__init__"} == set(MODULES)


@pytest.mark.parametrize("module", MODULES)
def test_imports_point_one_way(module: str) -> None:
    allowed = set(ORDER[: ORDER.index(module)])
    assert own(imports(parsed(module), deep=True)) <= allowed


def test_the_package_imports_nothing_of_its_own_until_asked() -> None:
    body = parsed("dplrgen").body
    plain = [n for n in body if not (isinstance(n, ast.If) and ast.unparse(n.test) == "TYPE_CHECKING")]
    assert own(imports(ast.Module(plain, []), deep=True)) == set()


@pytest.mark.parametrize("module", ORDER)
def test_torch_stays_where_it_belongs(module: str) -> None:
    if module in WITH_TORCH:
        return
    everywhere = {name.split(".")[0] for name in imports(parsed(module), deep=True)}
    # The command line looks for a device before it verifies, and says what is missing where torch is.
    assert not everywhere & ({"triton"} if module == "cli" else {"torch", "triton"})
    at_the_top = set(imports(parsed(module), deep=False))
    assert not {name.split(".")[0] for name in at_the_top} & {"torch"}
    assert module == "dplrgen" or not own(iter(at_the_top)) & WITH_TORCH


def test_importing_the_package_and_its_operators_loads_no_torch() -> None:
    code = (
        "import sys, dplrgen, dplrgen.cli, dplrgen.ops; dplrgen.build; dir(dplrgen.ops); print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


# ---------------------------------------------------------------------------------------------------------------------
# Public names


@pytest.mark.parametrize("module", ORDER)
def test_all_is_there_and_true(module: str) -> None:
    loaded = dplrgen if module == "dplrgen" else importlib.import_module(f"dplrgen.{module}")
    names = loaded.__all__
    assert len(set(names)) == len(names)
    assert [name for name in names if not hasattr(loaded, name)] == []
    assert not [name for name in names if name.startswith("_") and not name.endswith("__")]


@pytest.mark.parametrize("module", MODULES)
def test_what_another_module_uses_is_public(module: str) -> None:
    """A name that crosses modules is in ``__all__`` of the one that defines it."""
    hidden = []
    for name in used(parsed(module)):
        source, attribute = name.split(".")
        if attribute not in importlib.import_module(f"dplrgen.{source}").__all__:
            hidden.append(name)
    assert hidden == []


def used(tree: ast.Module) -> set[str]:
    """``module.name`` for every name of another module of the package that is imported or read as an attribute."""
    found, aliases = set(), {}
    for n in ast.walk(tree):
        if isinstance(n, ast.ImportFrom) and n.module == "dplrgen":
            aliases |= {alias.asname or alias.name: alias.name for alias in n.names if alias.name in ORDER}
        elif isinstance(n, ast.ImportFrom) and str(n.module).startswith("dplrgen."):
            found |= {f"{str(n.module).split('.')[1]}.{alias.name}" for alias in n.names}
    # A local value may share a module's name; a module is never assigned to.
    local = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    local |= {a.arg for a in ast.walk(tree) if isinstance(a, ast.arg)}
    for n in ast.walk(tree):
        if isinstance(n, ast.Attribute) and isinstance(n.value, ast.Name) and n.value.id in aliases.keys() - local:
            found.add(f"{aliases[n.value.id]}.{n.attr}")
    return {name for name in found if not name.split(".")[1].startswith("__")}


def test_the_public_names() -> None:
    assert dplrgen.__all__ == PUBLIC
    assert dir(dplrgen) == PUBLIC
    assert ops.__all__ == dir(ops) == sorted([*VARIANTS, *(f"{n}_step" for n in VARIANTS)])
    assert re.fullmatch(r"\d+\.\d+\.\d+", dplrgen.__version__)
    assert dplrgen.__version__ == codegen.VERSION
    assert (PACKAGE / "py.typed").is_file()


def test_unknown_names_suggest_the_nearest() -> None:
    with pytest.raises(AttributeError, match="no attribute 'opps'"):
        dplrgen.opps  # noqa: B018
    with pytest.raises(AttributeError, match="did you mean 'kda'"):
        ops.kdaa  # noqa: B018


# ---------------------------------------------------------------------------------------------------------------------
# Generated files


def test_generated_files_are_fresh(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(PACKAGE.parent)
    code = cli.main(["emit", "--all", "--check"])
    assert (code, capsys.readouterr().out) == (0, ""), "run: dplrgen emit --all"


def test_nothing_else_is_in_generated() -> None:
    assert {p.name for p in GENERATED.iterdir() if p.suffix == ".py"} == {"__init__.py", *(f"{n}.py" for n in VARIANTS)}


def test_the_emitter_is_deterministic() -> None:
    """The same record, built anew, in an interpreter that has compiled others: the same text."""
    first = codegen.render(VARIANTS["comba"])
    again = replace(VARIANTS["comba"])
    for other in ("dplr", "gla"):
        codegen.plans(VARIANTS[other])
    assert codegen.render(again) == first


SALTED = """
import sys
from dplrgen import ir
ir.Node.__hash__ = lambda node: hash((int(sys.argv[1]), id(node)))
from dplrgen.cli import main
raise SystemExit(main(["emit", "--all", "--check", "--out", sys.argv[2]]))
"""


@pytest.mark.parametrize("salt", ["1", "2"])
def test_the_emitter_does_not_depend_on_where_nodes_lie(salt: str) -> None:
    """A node's hash is its address, so a walk over a set of nodes would go another way in another process."""
    words = [sys.executable, "-c", SALTED, salt, str(GENERATED)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize("name", VARIANTS)
def test_headers(name: str) -> None:
    lines = (GENERATED / f"{name}.py").read_text(encoding="utf-8").splitlines()
    header = [line for line in lines[: lines.index("from __future__ import annotations")] if line.startswith("#")]
    assert header[0] == "# SPDX-License-Identifier: MIT"
    assert f"#     dplrgen emit --variant {name}" in header
    assert any(f"dplrgen {dplrgen.__version__}: do not edit" in line for line in header)
    assert all(f"#     {line}" in header for line in VARIANTS[name].binding())
    assert any(codegen.digest(VARIANTS[name]) in line for line in header)


MONTHS = "January|February|March|April|June|July|August|September|October|November|December"


@pytest.mark.parametrize("name", VARIANTS)
def test_generated_files_hold_no_date_and_no_path(name: str) -> None:
    text = (GENERATED / f"{name}.py").read_text(encoding="utf-8")
    assert not re.search(
        rf"\b(19|20)\d\d-\d\d-\d\d\b|\b(19|20)\d\d/\d\d/\d\d\b|\b({MONTHS})\b|\b\d\d:\d\d:\d\d\b", text
    )
    # A path: a slash or a backslash between names, with no space; divisions are printed with spaces.
    assert not re.search(r"(?<![\w)\]])[~.]?[/\\]\w+[/\\]\w", text)
    assert not re.search(r"\b[A-Z]:\\", text)
    assert str(PACKAGE.parent) not in text


@pytest.mark.parametrize("name", VARIANTS)
def test_generated_files_import_torch_triton_and_the_standard_library(name: str) -> None:
    tree = ast.parse((GENERATED / f"{name}.py").read_text(encoding="utf-8"))
    roots = {module.split(".")[0] for module in imports(tree, deep=True)}
    assert roots - sys.stdlib_module_names == {"torch", "triton"}
    public = [n for n in tree.body if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == "__all__"]
    assert [ast.literal_eval(n.value) for n in public] == [[name, f"{name}_step"]]


# ---------------------------------------------------------------------------------------------------------------------
# No variant and no stream outside the bindings


@pytest.mark.parametrize("template", sorted(p.name for p in TEMPLATES.glob("*.j2")))
def test_templates_name_no_variant_and_no_stream(template: str) -> None:
    text = (TEMPLATES / template).read_text(encoding="utf-8")
    words = set(re.findall(r"[A-Za-z_]\w*", text))
    assert sorted(words & set(VARIANTS)) == []
    # A letter alone may be a loop's variable; as a quoted text it is a name, unless it is put before another.
    streams = INPUTS - SHAPE_GIVING
    assert sorted(word for word in words & streams if len(word) > 1) == []
    assert re.findall(rf"""["']({"|".join(streams)})["'](?! ~)""", text) == []


def renamed(variant: Variant) -> Variant:
    """The variant with every input but q and v under another name."""
    table: dict[Node, Node] = {}
    for i, n in enumerate(variant.inputs):
        attrs = dict(n.attrs)
        if attrs.pop("name") not in SHAPE_GIVING:
            table[n] = leaf(f"stream_{i}", attrs.pop("axes"), **attrs)
    streams = variant.streams()
    new = substitute(streams.values(), table)
    inputs = tuple(table.get(n, n) for n in variant.inputs)
    return Variant(f"{variant.name}_renamed", inputs, **{s: new[n] for s, n in streams.items()})


@pytest.mark.parametrize("name", VARIANTS)
def test_the_names_of_the_inputs_do_not_matter(name: str, cache: None) -> None:
    """With other names the operator is the same, to the bit, and its kernels still refer to what they load."""
    streams, h0, do, dht = make(name, 1, 37, 1, 2, 20, 12, torch.float32, regime="mild", seed=7)
    results = []
    for call in (getattr(ops, name), compile_hook.build(renamed(VARIANTS[name]))):
        o, ht = call(*streams, initial_state=h0, output_final_state=True)
        results.append([o, ht, *torch.autograd.grad((o, ht), (*streams, h0), (do, dht))])
    for x, y in zip(*results, strict=True):
        assert torch.equal(x, y)
    assert undefined(codegen.render(renamed(VARIANTS[name]))) == set()


def undefined(text: str) -> set[str]:
    """Names that a function reads though nothing binds them: not its own, not the module's, not Python's."""
    tree = ast.parse(text)
    module = bound(tree) | set(dir(builtins))
    free: set[str] = set()
    for function in (n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)):
        read = {n.id for n in ast.walk(function) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}
        free |= read - bound(function) - module
    return free


def bound(tree: ast.AST) -> set[str]:
    """Names that are assigned, imported, defined or taken as an argument anywhere below."""
    names: set[str] = set()
    for n in ast.walk(tree):
        if isinstance(n, ast.Name) and not isinstance(n.ctx, ast.Load):
            names.add(n.id)
        elif isinstance(n, ast.FunctionDef | ast.ClassDef):
            names.add(n.name)
        elif isinstance(n, ast.arg):
            names.add(n.arg)
        elif isinstance(n, ast.alias):
            names.add((n.asname or n.name).split(".")[0])
    return names


@pytest.mark.parametrize("module", [name for name in MODULES if name != "variants"])
def test_no_branch_on_a_variants_name(module: str) -> None:
    assert [ast.unparse(n) for n in ast.walk(parsed(module)) if chooses(n)] == []


def chooses(n: ast.AST) -> bool:
    """Whether something depends on a text that is a variant's name: a comparison, a case, a table, a prefix."""
    parts: list[ast.AST | None] = []
    if isinstance(n, ast.Compare):
        parts = [n.left, *n.comparators]
    elif isinstance(n, ast.match_case):
        parts = [n.pattern]
    elif isinstance(n, ast.Dict):
        parts = list(n.keys)
    elif isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute) and n.func.attr in ("startswith", "endswith"):
        parts = list(n.args)
    texts = (m.value for part in parts if part is not None for m in ast.walk(part) if isinstance(m, ast.Constant))
    return any(text in VARIANTS for text in texts if isinstance(text, str))


def test_the_search_for_branches_finds_them() -> None:
    for text in (
        "x == 'kda'",
        "x in ('gla', 'y')",
        "{'kda': 1}",
        "x.startswith('gdn2')",
        "match x:\n case 'kda': pass",
    ):
        assert any(chooses(n) for n in ast.walk(ast.parse(text)))
    assert not any(chooses(n) for n in ast.walk(ast.parse("get('kda'); x == 'kdas'")))


def test_the_page_names_the_rules_of_each_pass() -> None:
    page = (PACKAGE.parent / "docs" / "design.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\w+) \| .* \| (.*)\|$", page, re.M)
    told = {name: re.findall(r"`([a-z-]+)`", rules) for name, rules in rows}
    sets = {
        "simplify": passes.IDENTITIES,
        "stabilize": passes.STABILIZE,
        "fold": passes.FOLD,
        "linearize": passes.LINEAR,
        "hoist": passes.hoist_rules(()),
        "lower": passes.LOWER,
    }
    assert {name: sorted(told[name]) for name in sets} == {
        n: sorted(r.name for r in rules) for n, rules in sets.items()
    }
