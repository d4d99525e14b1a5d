"""The compiler's front half as a flat list of named passes: binding -> forward program, backward program.

Each pass maps a program to a program; ``trace`` keeps every stage with the rules that fired, which is what
``dplrgen explain`` prints.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from dplrgen.autodiff import gradient
from dplrgen.errors import BindingError
from dplrgen.ir import Node, Program, leaf
from dplrgen.passes import (
    ABSORB,
    FOLD,
    IDENTITIES,
    LINEAR,
    LOWER,
    STABILIZE,
    Fired,
    chunkify,
    hoist_rules,
    lift,
    mask_padding,
    rewrite,
    stabilized,
    tokenize,
)
from dplrgen.variants import Variant

__all__ = ["BACKWARD", "FORWARD", "STEP", "Stage", "backward", "differentiate", "forward", "step", "trace"]

Rewritten = tuple[Program, list[Fired]]


@dataclass(frozen=True)
class Stage:
    """A program after a named pass."""

    name: str
    program: Program
    fired: tuple[Fired, ...] = ()


def _states(program: Program) -> list[Node]:
    return [state for state, _, _ in program.carried]


def simplify(program: Program) -> Rewritten:
    return rewrite(program, IDENTITIES)


def stabilize(program: Program) -> Rewritten:
    program, fired = rewrite(program, IDENTITIES + STABILIZE)
    stabilized(program)
    return program, fired


def fold(program: Program) -> Rewritten:
    return rewrite(program, IDENTITIES + FOLD)


def linearize(program: Program) -> Rewritten:
    return rewrite(program, IDENTITIES + FOLD + LINEAR)


def hoist(program: Program) -> Rewritten:
    return rewrite(program, IDENTITIES + hoist_rules(_states(program)))


def lower(program: Program) -> Rewritten:
    return rewrite(program, IDENTITIES + LOWER)


def absorb(program: Program) -> Rewritten:
    return rewrite(program, IDENTITIES + ABSORB)


def pad(program: Program) -> Rewritten:
    return mask_padding(program), []


Pass = tuple[str, Callable[[Program], Rewritten]]

#: Binding to forward program. The backward is taken of the program after ``fold``.
FORWARD: tuple[Pass, ...] = (
    ("simplify", simplify),
    ("stabilize", stabilize),
    ("fold", fold),
    ("hoist", hoist),
    ("lower", lower),
    ("pad", pad),
)

#: Differentiated program to backward program.
BACKWARD: tuple[Pass, ...] = (
    ("simplify", simplify),
    ("linearize", linearize),
    ("hoist", hoist),
    ("lower", lower),
    ("pad", pad),
)

#: Binding to the program of one token.
STEP: tuple[Pass, ...] = (("simplify", simplify), ("absorb", absorb), ("pad", pad))


def trace(program: Program, passes: tuple[Pass, ...], first: str) -> list[Stage]:
    """Run the passes and keep every stage."""
    stages = [Stage(first, program)]
    for name, run in passes:
        program, fired = run(program)
        stages.append(Stage(name, program, tuple(fired)))
    return stages


def forward(variant: Variant) -> list[Stage]:
    """The forward program after each pass; the last is what is scheduled."""
    stages = trace(chunkify(variant), FORWARD, "chunkify")
    if any(state is following for state, following, _ in stages[-1].program.carried):
        raise BindingError(f"{variant.name}: nothing decays, is erased or is written, so the state never changes")
    return stages


def step(variant: Variant) -> list[Stage]:
    """The program of one token after each pass; the last is what is printed."""
    return trace(tokenize(variant), STEP, "tokenize")


def differentiate(variant: Variant, program: Program) -> Program:
    """The backward of a folded forward program: cotangents of every input and of the state before the chunk.

    ``dS`` is the cotangent of the state after the chunk and goes from chunk to chunk backwards; the forward recurrence
    stays in the program, since its values are needed.
    """
    outputs = dict(program.outputs)
    (state, new, _) = program.carried[0]
    dstate = leaf("dS", ("K", "V"))
    inputs = [lift(n, ("C", *n.axes)) for n in variant.inputs]
    seeds = {outputs["o"]: leaf("do", ("C", "V")), new: dstate}
    cotangents = gradient(seeds, [*inputs, state])
    named = {cotangents[n]: f"d{label}" for n, label in program.names.items() if n in cotangents and n not in seeds}
    named = {n: label for n, label in named.items() if n.args}
    results = tuple(
        (f"d{n.attr('name')}", cotangents[lifted]) for n, lifted in zip(variant.inputs, inputs, strict=True)
    )
    carried = ((state, new, 1), (dstate, cotangents[state], -1))
    names = dict(named) | dict(program.names) | {cotangents[state]: "dS_prev"}
    return Program(f"{program.name}_backward", results, carried, names)


def backward(variant: Variant) -> list[Stage]:
    """The backward program after each pass; the last is what is scheduled."""
    folded = next(s.program for s in forward(variant) if s.name == "fold")
    return trace(differentiate(variant, folded), BACKWARD, "differentiate")
