"""Every stage of the compiler computes the same function: the token loop forward, its gradient backward.

A stage's program is run a chunk at a time by `dplrgen.interpret` in float64. What the passes should find is checked as
well: products, the sequential parts, and that nothing unbounded is exponentiated.

The programs of `kda` after each forward pass stand in golden/kda_forward.txt. After a change that is meant, write them
anew and read the difference:

    python tests/test_pipeline.py
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable
from pathlib import Path

import formulas
import metrics
import pytest
import torch
from inputs import has_gate, make
from oracles import ORACLES, names
from torch import Tensor

from dplrgen import codegen, interpret, passes, pipeline, schedule
from dplrgen.errors import IRError
from dplrgen.ir import Node, Program, const, exp, key, leaf, log, matmul, node, topological, unbounded_exponents, verify
from dplrgen.passes import IDENTITIES, STABILIZE, Rule, count, rewrite, stabilized
from dplrgen.pipeline import Stage
from dplrgen.schedule import Kernel, Plan
from dplrgen.variants import VARIANTS

torch.set_num_threads(1)

GOLDEN = Path(__file__).with_name("golden") / "kda_forward.txt"
CHUNK, CHUNKS, K, V, SCALE = 8, 3, 5, 4, 0.3
FIRST_STABLE = 2  # the programs before may divide by a decay


# Running a program


@dataclasses.dataclass(frozen=True)
class Given:
    """One head of one sequence: streams [T, ..], the state before, the cotangents of output and state."""

    streams: dict[str, Tensor]
    h0: Tensor
    do: Tensor
    dht: Tensor

    def chunk(self, i: int) -> dict[str, Tensor | float]:
        here = slice(i * CHUNK, (i + 1) * CHUNK)
        return {name: x[here] for name, x in self.streams.items()} | {"do": self.do[here], "scale": SCALE}


def given_of(name: str, regime: str = "mild", seed: int = 0) -> tuple[Given, metrics.Result]:
    """Inputs of a variant and what the token loop makes of them."""
    sizes = (1, CHUNK * CHUNKS, 1, 1, K, V)
    streams, h0, do, dht = make(name, *sizes, torch.float64, regime=regime, seed=seed)
    reference = metrics.reference(name, streams, h0, do, dht, SCALE)
    flat = {n: x.detach()[0, :, 0] for n, x in zip(names(name), streams, strict=True)}
    given = Given(flat, h0.detach()[0, 0], do[0, :, 0], dht[0, 0])
    heads = {key: x[0, 0] if key in ("ht", "dh0") else x[0, :, 0] for key, x in reference.items()}
    return given, heads


def run_forward(program: Program, given: Given) -> tuple[metrics.Result, list[Tensor]]:
    """Outputs, and the state before each chunk."""
    state, rows, states = given.h0, [], []
    for i in range(CHUNKS):
        states.append(state)
        result = interpret.run(program, given.chunk(i) | {"S": state})
        rows.append(result["o"])
        state = result["S"]
    return {"o": torch.cat(rows), "ht": state}, states


def run_backward(program: Program, given: Given, states: list[Tensor]) -> metrics.Result:
    dstate, parts = given.dht, []
    for i in reversed(range(CHUNKS)):
        leaves = given.chunk(i)
        result = interpret.run(program, leaves | {"S": states[i], "dS": dstate})
        dstate = result["dS"]
        parts.append({f"d{n}": result[f"d{n}"].expand_as(leaves[n]) for n in given.streams})
    return {name: torch.cat([p[name] for p in reversed(parts)]) for name in parts[0]} | {"dh0": dstate}


def assert_close(got: metrics.Result, want: metrics.Result, what: str) -> None:
    for name, x in got.items():
        limit = 1e-10 * max(1.0, want[name].abs().max().item())
        assert x.shape == want[name].shape, (what, name)
        assert (x - want[name]).abs().max() <= limit, (what, name, (x - want[name]).abs().max().item())


# Each stage is the same function


@pytest.mark.parametrize("name", ORACLES)
def test_every_forward_stage_is_the_token_loop(name: str) -> None:
    given, want = given_of(name)
    for stage in pipeline.forward(VARIANTS[name]):
        assert_close(run_forward(stage.program, given)[0], want, stage.name)


@pytest.mark.parametrize("name", ORACLES)
def test_every_backward_stage_is_its_gradient(name: str) -> None:
    given, want = given_of(name, seed=1)
    _, states = run_forward(pipeline.forward(VARIANTS[name])[-1].program, given)
    for stage in pipeline.backward(VARIANTS[name]):
        assert_close(run_backward(stage.program, given, states), want, stage.name)


@pytest.mark.parametrize("regime", ["strong", "spikes"])
@pytest.mark.parametrize("name", [n for n in ORACLES if has_gate(n)])
def test_stages_are_exact_for_unbounded_gates(name: str, regime: str) -> None:
    """From `stabilize` on, forward and backward."""
    given, want = given_of(name, regime, seed=2)
    ahead = pipeline.forward(VARIANTS[name])
    for stage in ahead[FIRST_STABLE:]:
        assert_close(run_forward(stage.program, given)[0], want, stage.name)
    _, states = run_forward(ahead[-1].program, given)
    for stage in pipeline.backward(VARIANTS[name]):
        assert_close(run_backward(stage.program, given, states), want, stage.name)


@pytest.mark.parametrize("stage", range(len(pipeline.BACKWARD) + 1))
def test_the_derived_backward_is_that_of_the_formulas(stage: int) -> None:
    """`dplr` against the closed formulas, given the same states and cotangents."""
    given, _ = given_of("dplr", regime="weak", seed=3)
    ahead = pipeline.forward(VARIANTS["dplr"])[-1].program
    result, states = run_forward(ahead, given)
    call = (*(given.streams[n] for n in ("q", "k", "v", "a", "b", "g")), given.h0)
    o, ht = formulas.chunk_forward(*call, CHUNK, SCALE)
    assert_close(result, {"o": o, "ht": ht}, "forward")
    want = formulas.chunk_backward(*call, given.do, given.dht, CHUNK, SCALE)
    found = pipeline.backward(VARIANTS["dplr"])[stage]
    assert_close(run_backward(found.program, given, states), want, found.name)


def test_the_absorbed_forward_is_that_of_the_formulas() -> None:
    given, _ = given_of("dplr_absorbed", regime="weak", seed=4)
    call = (*(given.streams[n] for n in ("q", "k", "v", "a", "d", "g")), given.h0)
    o, ht = formulas.absorbed_chunk_forward(*call, CHUNK, SCALE)
    result, _ = run_forward(pipeline.forward(VARIANTS["dplr_absorbed"])[-1].program, given)
    assert_close(result, {"o": o, "ht": ht}, "forward")


def test_a_wrong_program_would_be_seen() -> None:
    """The comparisons above, given a program with one decay left out."""
    given, want = given_of("kda")
    program = pipeline.forward(VARIANTS["kda"])[-1].program
    state, new, step = program.carried[0]
    forgetful = dataclasses.replace(program, carried=((state, new + state * 1e-6, step),))
    with pytest.raises(AssertionError, match="'o'"):
        assert_close(run_forward(forgetful, given)[0], want, "broken")


# What the passes find

PRODUCTS = {"simple_gla": 4, "gla": 4, "dplr": 13, "dplr_absorbed": 13, "gdn2_clipped": 13, "rwkv7": 13}
"""Tile products of a forward chunk; 8 for the others, where a is k."""


@pytest.mark.parametrize("name", ORACLES)
def test_counts(name: str) -> None:
    found = count(pipeline.forward(VARIANTS[name])[-1].program)
    assert found["products"] == PRODUCTS.get(name, 8)
    assert found["solves"] == (0 if name in ("gla", "simple_gla") else 1)
    assert (found["exponentials"] == 0) == (name == "delta")


EXPECTED = {
    "gdn": {"absorb-solve", "merge-products", "row-scale", "head-decay", "token-scale"},
    "kda": {"absorb-solve", "merge-products", "row-scale"},
    "dplr": set(),
    "dplr_absorbed": {"absorb-gate"},
    "gdn2_clipped": {"row-scale"},
    "delta": {"absorb-solve", "merge-products", "row-scale", "no-decay", "token-scale"},
    "simple_gla": {"no-erase", "head-decay", "token-scale"},
    "gla": {"no-erase"},
    "gdn2": {"absorb-solve", "merge-products"},
    "rwkv7": {"absorb-gate"},
    "comba": {"absorb-solve", "merge-products", "row-scale", "head-decay", "token-scale"},
}


@pytest.mark.parametrize("name", ORACLES)
def test_folds(name: str) -> None:
    known = set().union(*EXPECTED.values())
    assert {f.rule for stage in pipeline.forward(VARIANTS[name]) for f in stage.fired} & known == EXPECTED[name]


#: Tiles of keys' size that scans read: forward; backward, the states again; reversed. x: the inverse times keys.
READ = {
    "gdn": ({"x", "q", "KT"}, {"x", "KT"}, {"x", "q", "k"}),
    "comba": ({"x", "q", "KT"}, {"x", "KT"}, {"x", "q", "k"}),
    "delta": ({"x", "q", "k"}, {"x", "k"}, {"x", "q", "k"}),
    "simple_gla": ({"q", "k"}, {"k"}, {"q"}),
    "kda": ({"x", "QL", "KT"}, {"x", "KT"}, {"x", "QL", "KT"}),
}


@pytest.mark.parametrize("name", READ)
def test_with_one_decay_a_head_queries_and_keys_meet_states_as_given(name: str) -> None:
    made = codegen.plans(VARIANTS[name])
    scans = [(k, plan) for plan in (made.forward, made.backward) for k in plan.kernels if k.kind == "scan"]
    tiles = [{plan.names[n].rstrip("0123456789") for n in k.loads if n.axes == ("C", "K")} for k, plan in scans]
    assert tuple(tiles) == READ[name]


def test_rules_have_names_and_facts_of_their_own() -> None:
    rules = [*IDENTITIES, *STABILIZE, *passes.FOLD, *passes.LINEAR, *passes.LOWER, *passes.hoist_rules([])]
    assert len({r.name for r in rules}) == len(rules)
    assert all(r.fact for r in rules)


@pytest.mark.parametrize("name", ORACLES)
def test_a_finished_program_stays_as_it_is(name: str) -> None:
    """Every pass run again on its own result changes nothing."""
    for stages, run in ((pipeline.forward, pipeline.FORWARD), (pipeline.backward, pipeline.BACKWARD)):
        for stage, (_, again) in zip(stages(VARIANTS[name])[1:], run, strict=True):
            program, _ = again(stage.program)
            assert program.roots() == stage.program.roots(), stage.name


# Exponents


def skipping(name: str, skipped: str) -> Program:
    """The forward program with one pass left out."""
    stages = tuple(p for p in pipeline.FORWARD if p[0] != skipped)
    return pipeline.trace(passes.chunkify(VARIANTS[name]), stages, "chunkify")[-1].program


@pytest.mark.parametrize("name", ORACLES)
def test_unbounded_exponents_are_found_where_the_pass_is_skipped(name: str) -> None:
    program = skipping(name, "stabilize")
    if not has_gate(name):
        stabilized(program)
        return
    assert unbounded_exponents(program)
    with pytest.raises(IRError, match=rf"{name}: exp\(-sum\[to\]\(.*\)\) has an exponent of unbounded size"):
        stabilized(program)


@pytest.mark.parametrize("name", ["dplr_absorbed", "rwkv7"])
def test_a_division_by_the_decay_is_found(name: str) -> None:
    rules = [r for r in STABILIZE if r.name != "absorb-gate"]
    program, _ = rewrite(passes.chunkify(VARIANTS[name]), (*IDENTITIES, *rules))
    with pytest.raises(IRError, match=r"/ exp\(g\).* divides by a decay that may underflow to 0"):
        stabilized(program)


@pytest.mark.parametrize("name", ORACLES)
def test_what_is_exponentiated_is_never_positive(name: str) -> None:
    """In numbers: every exponential of a finished program, forward and backward, for gates at most 0."""
    given, _ = given_of(name, "spikes" if has_gate(name) else "zero", seed=5)
    ahead, back = pipeline.forward(VARIANTS[name])[-1].program, pipeline.backward(VARIANTS[name])[-1].program
    _, states = run_forward(ahead, given)
    for i in range(CHUNKS):
        leaves = given.chunk(i) | {"S": states[i], "dS": given.dht}
        for program in (ahead, back):
            values = interpret.evaluate(program.roots(), leaves)
            exponents = [values[n.args[0]] for n in program.nodes() if n.op == "exp"]
            assert all((x <= 0).all() for x in exponents)
            assert all(x.isfinite().all() for x in values.values())


# What the verifier refuses


def small(**changes) -> Program:
    """A program to break: o = q S, S of the next chunk = S + k^T k."""
    rows, state = leaf("q", ("C", "K")), leaf("S", ("K", "V"))
    new = state + matmul(rows, leaf("v", ("C", "V")), tx=True)
    record = {"name": "small", "outputs": (("o", matmul(rows, state)),), "carried": ((state, new, 1),), "names": {}}
    return Program(**(record | changes))


def test_the_verifier_accepts() -> None:
    verify(small())
    for variant in VARIANTS.values():
        for stage in (*pipeline.forward(variant), *pipeline.backward(variant)):
            verify(stage.program)


def test_the_verifier_refuses_a_name_given_twice() -> None:
    first, second = small().roots()
    with pytest.raises(IRError, match="small: two values share a name"):
        verify(small(names={first: "X", second: "X"}))


@pytest.mark.parametrize("name", ORACLES)
def test_a_launch_that_reads_what_none_has_written_is_refused(name: str) -> None:
    """Each plan holds in its own order; with its first launch last, something is read before it is there."""
    made = codegen.plans(VARIANTS[name])
    for plan in (made.forward, made.backward):
        schedule._ordered(plan.program, plan.kernels)
        with pytest.raises(IRError, match=rf"{name}.*: \w+ reads .* before it is written"):
            schedule._ordered(plan.program, (*plan.kernels[1:], plan.kernels[0]))


@pytest.mark.parametrize("axes", [("V", "K"), ("K",), ("C", "V"), ("C", "K")])
def test_the_verifier_refuses_a_state_of_another_shape(axes: tuple[str, ...]) -> None:
    state = leaf("S", ("K", "V"))
    with pytest.raises(IRError, match=r"carried value S has axes .*'K', 'V'.*"):
        verify(small(carried=((state, leaf("x", axes), 1),)))


def broken_rule(name: str, replacement) -> Rule:
    return Rule(name, "not so", lambda n: replacement(n) if n.op == "matmul" else None)


def test_a_rule_that_changes_the_shape_is_refused() -> None:
    rule = broken_rule("lose-rows", lambda n: leaf("x", ("C",)))
    with pytest.raises(IRError, match="rule lose-rows changed axes of"):
        rewrite(small(), (rule,))


def test_rules_that_undo_each_other_are_refused() -> None:
    calls = itertools.count()

    def undo(n: Node) -> Node | None:
        assert next(calls) < 100_000, "rewriting goes on and on"
        return n.args[0].args[0] if n.op == "neg" and n.args[0].op == "neg" else None

    there = Rule("there", "not so", lambda n: node("neg", -n) if n.op == "matmul" else None)
    with pytest.raises(IRError, match="small: rewriting does not end"):
        rewrite(small(), (there, Rule("back", "not so", undo)))


Q, A, S = leaf("q", ("C", "K")), leaf("a", ("C", "C")), leaf("S", ("K", "V"))
G = leaf("g", ("C",))

ILL_TYPED = {
    "inner axes": (lambda: matmul(Q, leaf("v", ("C", "V"))), "inner axes differ: K and C"),
    "a row as a tile": (lambda: matmul(G, Q), "two axes on both sides"),
    "mask of a row": (lambda: node("mask", Q, strict=True), r"expected \[C, C\], got \[C, K\]"),
    "broadcast": (lambda: Q + leaf("v", ("C", "V")), "do not broadcast"),
    "spread to fewer": (lambda: node("spread", Q, axes=("C",)), "do not broadcast"),
    "sum over what is not there": (lambda: node("sum", Q, axis="V"), "no axis 'V' to sum over"),
    "run over a state": (lambda: node("run", S, over="to"), "leading chunk axis"),
    "unknown run": (lambda: node("run", Q, over="upto"), "unknown run 'upto'"),
    "gram of values": (lambda: node("gram", leaf("v", ("C", "V")), Q, Q, left="to", strict=True), r"expected \[C, K\]"),
    "gram, gate of values": (lambda: node("gram", Q, Q, S, left="to", strict=True), "expected a log-decay"),
    "diagonal left of it": (lambda: node("gram", Q, Q, G, left="before", strict=False), "has no diagonal"),
    "pair a channel": (lambda: node("pair", Q, left="to", strict=True), "one log-decay a token"),
    "solve with a row": (lambda: node("solve", Q, Q), r"expected \[C, C\]"),
    "operands": (lambda: node("exp", Q, Q), "exp takes 1 operands, got 2"),
    "op": (lambda: node("exq", Q), "unknown op 'exq'"),
}


@pytest.mark.parametrize("what", ILL_TYPED)
def test_an_ill_typed_node_cannot_be_made(what: str) -> None:
    make_it, message = ILL_TYPED[what]
    with pytest.raises(IRError, match=message):
        make_it()


def test_equal_expressions_are_one_object() -> None:
    assert exp(log(key("k")) + 1.0) is exp(log(key("k")) + 1.0)
    assert const(1) is const(1.0)
    assert matmul(A, Q) is not matmul(A, Q, tx=True)
    assert key("k") is not leaf("k", ("K",))


# The sequential parts


def cycle_through(program: Program, state: Node, new: Node) -> set[Node]:
    """What lies between a carried value and its next, found without the compiler's graph."""
    behind: set[Node] = set()
    for n in program.nodes():
        if n is state or any(a in behind for a in n.args):
            behind.add(n)
    return {n for n in topological([new]) if n in behind} - {state}


def scans(plan: Plan) -> list[Kernel]:
    return [k for k in plan.kernels if k.state is not None]


def state_sized_products(nodes: Iterable[Node], program: Program) -> set[Node]:
    """Products of the state's size that one value reads: their operands are smaller, so they ride along."""
    nodes = set(nodes)
    readers = {n: [m for m in program.nodes() if n in m.args] for n in nodes}
    return {n for n in nodes if n.op == "matmul" and n.axes == ("K", "V") and len(readers[n]) == 1}


@pytest.mark.parametrize("name", ORACLES)
def test_the_backward_scans_are_the_cycles_through_their_states(name: str) -> None:
    """S forwards and dS backwards, nothing else sequential but the products that feed them."""
    plan = codegen.plans(VARIANTS[name]).backward
    found = scans(plan)
    assert [(k.state[0].attr("name"), k.step) for k in found] == [("S", 1), ("dS", -1)]
    for kernel, (state, new, _) in zip(found, plan.program.carried, strict=True):
        assert kernel.state == (state, new)
        cycle = cycle_through(plan.program, state, new)
        extra = set(kernel.nodes) - cycle
        assert cycle <= set(kernel.nodes)
        assert extra == state_sized_products(extra, plan.program)
    others = {n for k in plan.kernels if k.state is None for n in k.nodes}
    assert not others & {n for k in found for n in cycle_through(plan.program, *k.state)}


@pytest.mark.parametrize("name", ORACLES)
def test_the_forward_scan_is_the_cycle_and_the_output(name: str) -> None:
    plan = codegen.plans(VARIANTS[name]).forward
    (kernel,) = scans(plan)
    program = plan.program
    ((state, new, _),) = program.carried
    assert (kernel.state, kernel.step) == ((state, new), 1)
    ((_, output),) = program.outputs
    sequential = cycle_through(program, state, new) | cycle_through(program, state, output)
    feeds = {n for n in kernel.nodes if n not in sequential}
    assert sequential <= set(kernel.nodes)
    # What is left waits for nothing but the cycle: products of the state's size, and those that only the output reads.
    only_output = {n for n in topological([output]) if n not in topological([new])}
    assert feeds <= only_output | state_sized_products(feeds, program)


def test_the_reverse_scan_loads_what_the_derivation_says() -> None:
    """dS needs the products with W, QL and the writes' tail, and dO: six tiles of `dplr`."""
    plan = codegen.plans(VARIANTS["dplr"]).backward
    _, reverse = scans(plan)
    loaded = {plan.names[n] for n in reverse.loads}
    assert {"W", "QL", "AT", "Gc", "do"} <= loaded
    assert len(loaded - {"dS"}) == 6


# The golden text


def text_of(stages: list[Stage]) -> str:
    """Every program, the rules that led to it first."""
    parts = []
    for stage in stages:
        rules = ", ".join(dict.fromkeys(f.rule for f in stage.fired))
        counts = ", ".join(f"{number} {what}" for what, number in count(stage.program).items())
        parts.append(f"== {stage.name}: {counts}\n" + (f"fired: {rules}\n" if rules else "") + f"{stage.program}\n")
    return "\n".join(parts)


def test_golden() -> None:
    assert text_of(pipeline.forward(VARIANTS["kda"])) == GOLDEN.read_text(encoding="utf-8")


def main() -> None:
    """Write the golden text anew."""
    GOLDEN.parent.mkdir(exist_ok=True)
    GOLDEN.write_text(text_of(pipeline.forward(VARIANTS["kda"])), encoding="utf-8")


if __name__ == "__main__":
    main()
