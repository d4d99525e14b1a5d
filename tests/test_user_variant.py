"""A record of the user's own: built, loaded from a file, and refused with the reason if it is wrong."""

from __future__ import annotations

import ast
import builtins
import keyword
import multiprocessing
import os
import re
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import bindings
import pytest
import torch
from bindings import Sizes
from interpreted import run_files

import dplrgen
from dplrgen import Variant, codegen, compile_hook
from dplrgen.codegen import write_if_changed
from dplrgen.errors import BindingError, IRError
from dplrgen.ir import (
    Node,
    const,
    dot,
    exp,
    gate,
    key,
    leaf,
    log,
    minimum,
    node,
    norm,
    param,
    safe_div,
    show,
    sigmoid,
    sqrt,
    value,
)
from dplrgen.variants import VARIANTS

torch.set_num_threads(1)
pytestmark = pytest.mark.usefixtures("cache")

SIZES = Sizes(B=2, T=71, H=1, HV=2, K=6, V=5)

q, k, j, v, u = key("q"), key("k"), key("j"), value("v"), value("u")
g, g_head, beta, w = gate("g", "K"), gate("g_head"), gate("beta"), gate("w", "V")


def mine(**changes: Any) -> Variant:
    """A gated delta rule on normalized keys with a learned forget floor: no variant of the package."""
    unit = safe_div(k, norm(k))
    record = {
        "name": "mine",
        "inputs": (q, k, v, g, beta),
        "decay": exp(g * sigmoid(beta)),
        "a": unit,
        "b": beta * unit,
        "k": unit,
        "v": beta * v,
        "about": "a delta rule of one's own",
    }
    return Variant(**(record | changes))


def assert_is_the_loop(variant: Variant, sizes: Sizes = SIZES) -> None:
    given = bindings.make_inputs(variant, sizes)
    got = bindings.run(dplrgen.build(variant), variant, given)
    assert not bindings.differences(got, bindings.reference(variant, given), 1e-10), variant.binding()


# Built


def test_built_equals_the_loop() -> None:
    assert_is_the_loop(mine())


def test_the_same_record_is_the_same_op() -> None:
    op = dplrgen.build(mine())
    assert dplrgen.build(mine()) is op
    assert dplrgen.build(replace(mine())) is op
    assert op.__name__ == "mine"
    module = sys.modules[op.__module__]
    assert module.mine is op
    assert Path(module.__file__).is_relative_to(compile_hook.cache_folder())
    assert Path(module.__file__).read_text() == codegen.render(mine())


def test_another_record_of_that_name_is_another_op() -> None:
    """Down to the last digit of a constant."""
    ops = [dplrgen.build(mine(b=const(c) * k)) for c in (0.4, 0.4000000001)]
    given = bindings.make_inputs(mine(), SIZES)
    first, second = (bindings.run(op, mine(), given)["o"] for op in ops)
    assert ops[0] is not ops[1]
    assert 0 < (first - second).abs().max() < 1e-6


def test_the_docstring_holds_the_binding() -> None:
    doc = dplrgen.build(mine()).__doc__
    assert doc.startswith("a delta rule of one's own")
    for line in mine().binding():
        assert line in doc


def test_a_folder_that_cannot_be_written_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocked))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert compile_hook.cache_folder().is_relative_to(tmp_path)
    assert compile_hook.cache_folder().is_dir()
    compile_hook.cache_folder().chmod(0o777)  # what lies there would be run
    with pytest.raises(PermissionError, match="can be written by others"):
        compile_hook.cache_folder()


def test_a_folder_that_is_read_only_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine, other = tmp_path / "mine", tmp_path / "other"
    other.mkdir()
    monkeypatch.setenv("XDG_CACHE_HOME", str(mine))
    monkeypatch.setattr(tempfile, "tempdir", str(other))
    assert compile_hook.cache_folder() == mine / "dplrgen"
    monkeypatch.setattr(os, "access", lambda path, mode: not Path(path).is_relative_to(mine))  # root may write anywhere
    assert compile_hook.cache_folder().is_relative_to(other)


@pytest.mark.parametrize("wrong", [None, "kda", "mine.py:mine", 3, Variant])
def test_build_takes_a_record(wrong: object) -> None:
    with pytest.raises(BindingError, match=r"build takes a dplrgen\.Variant, got \w+"):
        dplrgen.build(wrong)


# What a record may be


@pytest.mark.parametrize(
    "variant",
    [
        mine(inputs=(q, k, j, v, g, beta)),
        mine(inputs=(q, k, v, g, beta, w, u)),
        mine(inputs=(q, k, j, v, g), a=j, b=const(0), decay=exp(g), v=v),
        mine(a=const(0)),
        mine(v=const(0.5)),
        mine(k=const(0.25)),
        mine(b=const(0.1)),
        mine(q=const(0.5)),
        mine(decay=const(0.75)),
        mine(decay=const(1), inputs=(q, k, v, beta)),
    ],
    ids=["unused-key", "unused-gates", "nothing-erased", "a-0", "v", "k", "b", "q", "decay", "decay-1"],
)
def test_inputs_and_streams_that_do_not_matter(variant: Variant) -> None:
    """An input that changes nothing has gradient 0, not none and not what memory held."""
    assert_is_the_loop(variant)


@pytest.mark.parametrize("swapped", [{"q": "r"}, {"v": "x"}, {"q": "query", "k": "key", "v": "value"}])
def test_no_name_means_anything(swapped: dict[str, str]) -> None:
    """Streams are known by their place in the record, inputs by their role."""
    r, c, x, f = key(swapped.get("q", "q")), key(swapped.get("k", "k")), value(swapped.get("v", "v")), gate("f", "K")
    assert_is_the_loop(Variant("mine", (c, f, x, beta, r), decay=exp(-f * f), a=c, b=beta * c, k=c, v=x, q=r))


def test_inputs_used_alike_have_gradients_of_their_own(tmp_path: Path) -> None:
    """Two inputs whose gradients are one expression, one of them with fewer heads; in the kernels too."""
    e = gate("e", "K")
    variant = mine(inputs=(q, k, j, v, u, g, e, beta), k=k + j + e, v=v + u)
    assert_is_the_loop(variant)
    given = bindings.make_inputs(variant, Sizes(B=1, T=35, H=1, HV=2, K=20, V=18), torch.float32)
    (got,) = run_files([(variant, given)], tmp_path)
    assert not isinstance(got, str), got
    assert not bindings.differences(got, bindings.reference(variant, given), 1e-4)


def test_sizes_come_from_a_key_of_any_name(tmp_path: Path) -> None:
    """No input is called q, and K is past the size at which values cross launches in the inputs' dtype."""
    r = key("r")
    variant = mine(name="unnamed", inputs=(r, k, v, g, beta), q=r)
    given = bindings.make_inputs(variant, Sizes(B=1, T=20, H=1, HV=1, K=72, V=18), torch.float32)
    (got,) = run_files([(variant, given)], tmp_path)
    assert not isinstance(got, str), got
    assert not bindings.differences(got, bindings.reference(variant, given), 1e-4)


def test_an_expression_that_shares_its_parts_is_not_written_out() -> None:
    """What is used twice is one value: twenty doublings are twenty values, not a million."""
    deep = k
    for _ in range(20):
        deep = 0.5 * (deep + sigmoid(deep))
    variant = mine(k=deep, name="deep")
    assert len(codegen.render(variant)) < 300_000
    assert_is_the_loop(variant)


def test_heads_and_channels_mix() -> None:
    """A number a head beside channels is not zero in the padding of a tile."""
    assert_is_the_loop(mine(k=0.3 * (k + beta), a=0.3 * (k + beta), v=v + dot(k + beta, k + beta)))


# Names


def names_in(text: str, wanted: Callable[[str], bool]) -> set[str]:
    """Names, parameters and functions of a file's functions, those that an input could have."""
    functions = [n for n in ast.parse(text).body if isinstance(n, ast.FunctionDef) and wanted(n.name)]
    found = {f.name for f in functions}
    for n in (n for f in functions for n in ast.walk(f)):
        if isinstance(n, ast.Name | ast.arg):
            found.add(n.id if isinstance(n, ast.Name) else n.arg)
    return {name for name in found if re.fullmatch(r"[a-z]\w*", name) and not re.fullmatch(r"x\d\d+\w*", name)}


def declared(names: list[str]) -> Variant:
    """A delta rule whose key is a sum of inputs with these names."""
    extra = [key(name) for name in names]
    total = k
    for x in extra:
        total = total + x
    total = total / (1.0 + len(extra))
    return Variant("named", (q, k, *extra, v, g, beta), decay=exp(g), a=total, b=beta * total, k=total, v=v)


def accepted(name: str) -> bool:
    try:
        declared([name])
    except BindingError:
        return False
    return True


def free_names(wanted: Callable[[str], bool]) -> list[str]:
    """What a file's functions name, and what they would name for an input, as far as an input may be called that."""
    found = {f"d{name}" for name in ("q", "k", "v", "g", "beta", "beta_ptr")} | set(dir(builtins)) - set(keyword.kwlist)
    for variant in (mine(), declared(["first", "other"]), VARIANTS["kda"]):
        found |= names_in(codegen.render(variant), wanted)
    found -= {"q", "k", "v", "g", "beta"}
    words = {n for n in found if re.fullmatch(r"[a-z][a-z0-9_]*", n) and not (n[0] == "d" and n[1:] in found)}
    return sorted(name for name in words if accepted(name))


def batches(names: list[str], size: int) -> list[list[str]]:
    return [names[i : i + size] for i in range(0, len(names), size)]


def test_an_input_never_collides_with_a_name_of_the_file() -> None:
    """Every name that a generated file uses is refused as an input's or works as one."""
    failures = {}
    for names in batches(free_names(lambda function: True), 16):
        try:
            assert_is_the_loop(declared(names), Sizes(B=1, T=35, H=1, HV=2, K=4, V=3))
        except Exception as error:
            failures[tuple(names)] = f"{type(error).__name__}: {error}"[:200]
    assert not failures


def test_an_input_never_collides_with_a_name_of_a_kernel(tmp_path: Path) -> None:
    names = free_names(lambda function: re.fullmatch(r"_(for|back)ward_(?!torch|fake|impl)\w+", function) is not None)
    variants = [declared(batch).renamed(f"named_{i}") for i, batch in enumerate(batches(names, 8))]
    sizes = Sizes(B=1, T=19, H=1, HV=1, K=18, V=17)
    cases = [(variant, bindings.make_inputs(variant, sizes, torch.float32)) for variant in variants]
    failures = {}
    for (variant, given), got in zip(cases, run_files(cases, tmp_path), strict=True):
        wrong = got if isinstance(got, str) else bindings.differences(got, bindings.reference(variant, given), 1e-4)
        if wrong:
            failures[tuple(n.attr("name") for n in variant.inputs)] = wrong
    assert not failures


@pytest.mark.parametrize("name", ["second", "made_0", "left_1", "operand_0", "cotangent_0_unit"])
def test_locals_of_kernels_with_trees_are_refused(name: str) -> None:
    assert not accepted(name)


BAD_NAMES = ["lambda", "class", "in", "not", "is", "Q", "2x", "a-b", "", "q k", "_x", "é", "__init__", "x\n"]


@pytest.mark.parametrize("name", BAD_NAMES)
def test_names_that_python_or_the_style_refuse(name: str) -> None:
    with pytest.raises(BindingError, match=re.escape(repr(name))):
        declared([name])
    with pytest.raises(BindingError, match=re.escape(repr(name))):
        mine(name=name)


# Refused


def state() -> Node:
    return leaf("S", ("K", "V"))


WRONG: dict[str, tuple[Callable[[], object], str]] = {
    "a stream that there is not": (lambda: mine(w=k), r"mine: 'w' is not a stream \(streams: q, decay, a, b, k, v\)"),
    "a stream misspelt": (lambda: mine(decoy=k), r"mine: 'decoy' is not a stream; did you mean 'decay'\?"),
    "streams left out": (
        lambda: Variant(name="mine", inputs=(q, k, v, g), decay=exp(g), a=k),
        r"mine: no b and no k and no v given",
    ),
    "the name of a module": (lambda: mine(name="torch"), r"variant name 'torch' is that of something"),
    "the name of a function": (lambda: mine(name="zip"), r"variant name 'zip' is that of something"),
    "two lines about it": (lambda: mine(about="a\nb"), r"mine: about must be one line"),
    "quotes about it": (lambda: mine(about='the """ one'), r"mine: about must be one line without quotes"),
    "unknown input": (lambda: mine(v=w * v), r"stream v = w \* v reads 'w', which is not an input \(inputs: q, k,"),
    "unknown input deep inside": (lambda: mine(k=k * norm(j)), r"stream k = k \* sqrt\(.*\) reads 'j', which is"),
    "another input of that name": (lambda: mine(v=gate("beta", "V") * v), r"stream v = beta \* v reads 'beta'"),
    "decay of value channels": (lambda: mine(decay=exp(w)), r"stream decay = exp\(w\)"),
    "declared, decay of value channels": (
        lambda: mine(inputs=(q, k, v, g, beta, w), decay=exp(w)),
        r"stream decay = exp\(w\) must have axes \[\] or \[K\], got \[V\]",
    ),
    "b of value channels": (lambda: mine(b=beta * v), r"stream b = beta \* v must have axes \[K\], got \[V\]"),
    "a one number a head": (lambda: mine(a=beta), r"stream a = beta must have axes \[K\], got \[\]"),
    "k one number a head": (lambda: mine(k=norm(k)), r"stream k = sqrt\(.*\) must have axes \[K\], got \[\]"),
    "v of key channels": (lambda: mine(v=beta * k), r"stream v = beta \* k must have axes \[V\], got \[K\]"),
    "q of value channels": (lambda: mine(q=v), r"stream q = v must have axes \[K\], got \[V\]"),
    "reads the state": (
        lambda: mine(v=v - node("sum", state() * k, axis="K")),
        r"stream v = v \+ -sum_K\(\(S \* k\)\) reads the state",
    ),
    "reads the cotangent": (lambda: mine(v=v * node("sum", leaf("do", ("V",)), axis="V")), r"stream v = .*'do'"),
    "reads the scale": (lambda: mine(q=param("scale") * q), r"stream q = scale \* q .*found scale"),
    "over a whole chunk": (lambda: mine(decay=exp(leaf("g", ("C", "K")))), r"stream decay = exp\(g\) .*token"),
    "declared twice": (lambda: mine(inputs=(q, k, v, g, beta, beta)), r"mine: input 'beta' is declared twice"),
    "two shapes of one name": (lambda: mine(inputs=(q, k, v, g, gate("g"), beta)), r"input 'g' is declared twice"),
    "an expression as an input": (lambda: mine(inputs=(q, k, v, exp(g), beta)), r"must be leaves .*got exp\(g\)"),
    "a leaf without a role": (lambda: mine(inputs=(q, k, v, leaf("g", ("K",)), beta)), r"must be leaves .*got g"),
    "a constant as an input": (lambda: mine(inputs=(q, k, v, g, beta, const(1))), r"must be leaves .*got 1"),
    "no q": (lambda: mine(inputs=(k, v, g, beta)), r"no input named 'q' and no expression given for q"),
    "reserved, scale": (lambda: mine(inputs=(q, k, v, g, beta, gate("scale"))), r"input name 'scale' is reserved"),
    "reserved, state": (lambda: mine(inputs=(q, k, v, g, beta, gate("initial_state"))), r"'initial_state' is reserved"),
    "a number for a stream": (lambda: mine(decay=1), r"stream decay .*\b1\b"),
    "nothing for a stream": (lambda: mine(v=None), r"stream v .*None"),
    "a name for a stream": (lambda: mine(a="k"), r"stream a .*'k'"),
    "a tensor for a stream": (lambda: mine(a=torch.ones(3)), r"stream a .*"),
    "decay 0": (lambda: mine(decay=const(0)), r"stream decay = 0"),
    "decay below 0": (lambda: mine(decay=const(-0.5)), r"stream decay = -0\.5"),
    "decay above 1": (lambda: mine(decay=const(1.5)), r"stream decay = 1\.5"),
    "decay above 1, of numbers": (lambda: mine(decay=0.5 * const(3)), r"stream decay = 0\.5 \* 3\.0 must be in"),
    "decay above 1, by exp": (lambda: mine(decay=exp(const(3))), r"stream decay = exp\(3\.0\) must be in"),
    "numbers that give none": (lambda: mine(v=log(const(-1)) * v), r"stream v = .*must be finite, found log\(-1\.0\)"),
    "numbers too large": (lambda: mine(v=exp(const(1000)) * v), r"stream v = .*must be finite, found exp\(1000\.0\)"),
    "numbers over 0": (lambda: mine(v=(const(1) / const(0)) * v), r"stream v = .*must be finite, found 1\.0 / 0\.0"),
    "reserved, states": (lambda: mine(inputs=(q, k, v, g, beta, gate("states"))), r"input name 'states' is reserved"),
    "no value input": (lambda: mine(inputs=(q, k, g, beta), v=const(1)), r"mine: .*value"),
    "a list of inputs": (lambda: mine(inputs=[q, k, v, g, "beta"]), r"mine: .*beta"),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_binding_is_refused_with_the_reason(what: str) -> None:
    make, message = WRONG[what]
    with pytest.raises(BindingError, match=message) as caught:
        make()
    assert "\n" not in str(caught.value)


#: Erase vectors over a part of the decay, or the whole of it written otherwise: (decay, what d is divided by).
GH = gate("gh")
DIVIDED = {
    "exp(gh) exp(g)": (exp(GH) * exp(g), exp(GH) * exp(g)),
    "exp(gh) exp(g), by one": (exp(GH) * exp(g), exp(g)),
    "exp(gh + g), by one": (exp(GH + g), exp(g)),
    "exp(beta g), turned": (exp(beta * g), exp(g * beta)),
    "sigmoid(g)": (sigmoid(g), sigmoid(g)),
    "half of it": (0.5 * exp(g), 0.5 * exp(g)),
    "half of g": (exp(g), exp(0.5 * g)),
    "undone": (exp(g), 1.0 / exp(-g)),
    "clipped": (exp(minimum(g, -beta)), exp(g)),
    "a gate itself": (g, g),
    "by 1 + it": (exp(g), 1.0 + exp(g)),
}


@pytest.mark.parametrize("what", DIVIDED)
def test_a_division_by_a_part_of_the_decay_is_refused_or_right(what: str) -> None:
    """Refused where it could be 0 in numbers, right where it cannot."""
    decay, bottom = DIVIDED[what]
    record = mine(inputs=(q, k, v, g, GH, beta), decay=decay, b=0.5 * k / bottom)
    if what == "by 1 + it":
        assert_is_the_loop(record)
    else:
        with pytest.raises(IRError, match=r"divides by a decay that may underflow|has an exponent of unbounded size"):
            dplrgen.build(record)


@pytest.mark.parametrize("decay", [exp(g), exp(GH + g)], ids=show)
def test_an_erase_vector_over_the_decay_is_never_divided(decay: Node) -> None:
    """Right where the division is, and finite where the decay is 0, which the loop's own division is not."""
    record = mine(inputs=(q, k, v, g, GH, beta), decay=decay, b=0.5 * k / decay)
    assert_is_the_loop(record)
    given = bindings.make_inputs(record, SIZES)
    with torch.no_grad():
        given.streams[3][:, ::7] = -1e4
    assert all(x.isfinite().all() for x in bindings.run(dplrgen.build(record), record, given).values())


def test_log_decays_that_are_keys_are_summed_exactly() -> None:
    """In one bfloat16 part only where they are bfloat16 themselves, whatever their role."""
    record = mine(name="by_key", inputs=(q, k, j, v), decay=exp(j), a=k, b=0.5 * k, k=k, v=v)
    pytest.importorskip("triton")
    module = sys.modules[dplrgen.build(record).__module__]
    for dtype, parts in ((torch.float16, 3), (torch.bfloat16, 1)):
        shared, _ = module._setting(torch.zeros(1, 4, 1, 64, dtype=dtype), (), 64)
        assert shared["GATE_PARTS"] == parts


def test_expressions_that_do_not_fit_are_refused_where_they_are_written() -> None:
    with pytest.raises(IRError, match=r"mul\(k \[K\], v \[V\]\): axes .* do not broadcast"):
        mine(v=k * v)
    with pytest.raises(IRError, match=r"sum\(v \* u \[V\]\): no axis 'K'"):
        mine(v=v * dot(v, u))
    with pytest.raises(IRError, match="takes 2 operands, got 1"):
        node("add", k)
    for number in (float("inf"), float("nan"), 10**400):
        with pytest.raises(IRError, match="a constant must be finite"):
            mine(v=number * v)
    with pytest.raises(IRError, match="expected an expression or a number, got 'x'"):
        mine(v=minimum(v, "x"))
    with pytest.raises(IRError, match="unknown op 'softplus'"):
        node("softplus", g)


def test_a_state_that_never_changes_is_refused() -> None:
    still = mine(decay=const(1), b=const(0), v=0.0 * v)
    with pytest.raises(BindingError, match="mine: nothing decays, is erased or is written"):
        dplrgen.build(still)


def test_numbers_are_expressions_too() -> None:
    assert_is_the_loop(mine(decay=minimum(exp(g), 0.9), k=safe_div(k, 2.0), v=sqrt(0.25) * v))
    assert_is_the_loop(mine(decay=minimum(0.9, exp(g)), b=minimum(0.4, beta) * k, v=safe_div(v, 0.5)))


def test_threads_that_build_one_record_get_one_operator() -> None:
    record = mine(name="at_once", v=0.3 * v)
    with ThreadPoolExecutor(6) as pool:
        made = list(pool.map(lambda _: dplrgen.build(record), range(6)))
    assert len(set(made)) == 1


def _write(job: tuple[Path, str]) -> None:
    for _ in range(30):
        write_if_changed(*job)


def test_processes_that_write_one_file_leave_one_of_theirs(tmp_path: Path) -> None:
    texts = [letter * 200_000 for letter in "abc"]
    path = tmp_path / "one.py"
    with ProcessPoolExecutor(3, mp_context=multiprocessing.get_context("spawn")) as pool:
        list(pool.map(_write, [(path, text) for text in texts]))
    assert path.read_text() in texts
    assert list(tmp_path.iterdir()) == [path]


def test_records_and_nodes_do_not_change() -> None:
    with pytest.raises(AttributeError):
        mine().decay = const(1)
    with pytest.raises(AttributeError):
        k.op = "exp"


def test_a_division_by_what_grows_is_a_user_expression_like_any_other() -> None:
    """1 / (1 + exp(-x)) is the sigmoid; only a division by the decay itself is none of the kernels' business."""
    assert_is_the_loop(mine(v=v / (1.0 + exp(-beta))))


# Loaded from a file

FILE = """
from dplrgen import Variant
from dplrgen.ir import exp, gate, key, value

q, k, v, g = key("q"), key("k"), value("v"), gate("g")
mine = Variant(name="mine", inputs=(q, k, v, g), decay=exp(g), a=k, b=0.5 * k, k=k, v=v)
other = 3
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "bindings of mine.py"
    path.write_text(FILE)
    return path


def test_a_record_is_loaded_from_a_file(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = compile_hook.load_variant(f"{file}:mine")
    assert loaded == Variant("mine", (q, k, v, gate("g")), decay=exp(gate("g")), a=k, b=0.5 * k, k=k, v=v)
    assert_is_the_loop(loaded)
    monkeypatch.chdir(file.parent)
    assert compile_hook.load_variant(f"{file.name}:mine") == loaded


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("{}:yours", "'yours' must be a dplrgen.Variant, found nothing"),
        ("{}:other", "'other' must be a dplrgen.Variant, found int"),
        ("{}:Variant", "'Variant' must be a dplrgen.Variant, found type"),
        ("{}:", "'' must be a dplrgen.Variant"),
        ("{}x:mine", "no file"),
        ("{}", "no file"),
        ("mine", "no file"),
        ("", "no file"),
        (":mine", "no file"),
    ],
)
def test_references_that_lead_nowhere(file: Path, reference: str, message: str) -> None:
    text = reference.format(file)
    with pytest.raises(BindingError, match=re.escape(message)) as caught:
        compile_hook.load_variant(text)
    assert text in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("mine = (", "SyntaxError"),
        ("raise RuntimeError('half way')", "RuntimeError: half way"),
        ("import a_module_that_is_not_there", "a_module_that_is_not_there"),
        ("from dplrgen.ir import key, value\nkey('k') * value('v')", "do not broadcast"),
    ],
)
def test_files_that_do_not_run(tmp_path: Path, source: str, message: str) -> None:
    path = tmp_path / "broken.py"
    path.write_text(source)
    with pytest.raises(BindingError, match=message) as caught:
        compile_hook.load_variant(f"{path}:mine")
    assert "\n" not in str(caught.value)


def test_a_file_that_is_not_python(tmp_path: Path) -> None:
    path = tmp_path / "mine.txt"
    path.write_text(FILE)
    with pytest.raises(BindingError, match="is not a Python file"):
        compile_hook.load_variant(f"{path}:mine")


def test_a_wrong_record_in_a_file_says_what_is_wrong(tmp_path: Path) -> None:
    path = tmp_path / "wrong.py"
    path.write_text(FILE.replace("v=v)", "v=k)"))
    with pytest.raises(BindingError, match=r"stream v = k must have axes \[V\], got \[K\]"):
        compile_hook.load_variant(f"{path}:mine")
