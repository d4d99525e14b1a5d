"""From a binding to the chunk programs: chunkify, and rewrite rules with names.

A rule is a function from a node to its replacement (None where it does not apply). Rules see patterns of operations
only; none knows a variant. ``rewrite`` applies a set bottom-up until nothing changes and records what fired where.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from dplrgen.errors import IRError
from dplrgen.ir import (
    OPS,
    Axes,
    Node,
    Program,
    const,
    exp,
    leaf,
    matmul,
    node,
    param,
    show,
    substitute,
    topological,
    unbounded_exponents,
    verify,
)
from dplrgen.variants import Variant

__all__ = [
    "ABSORB",
    "FOLD",
    "IDENTITIES",
    "LINEAR",
    "LOWER",
    "STABILIZE",
    "Fired",
    "Rule",
    "chunkify",
    "count",
    "factors",
    "hoist_rules",
    "lift",
    "literal",
    "mask_padding",
    "product",
    "rewrite",
    "spread",
    "stabilized",
    "terms",
    "tokenize",
    "total",
    "zero",
]

RuleFunction = Callable[[Node], Node | None]


@dataclass(frozen=True)
class Rule:
    """A rewrite with a name; ``fact`` says what is known that makes it right."""

    name: str
    fact: str
    apply: RuleFunction
    label: str = ""  # a name for what it makes, where that is worth one


@dataclass(frozen=True)
class Fired:
    """A rule that fired: what it replaced and by what."""

    rule: str
    before: str
    after: str


def rule(name: str, fact: str, label: str = "") -> Callable[[RuleFunction], Rule]:
    return lambda apply: Rule(name, fact, apply, label)


# ---------------------------------------------------------------------------------------------------------------------
# Sums and products as lists


def terms(n: Node) -> list[tuple[int, Node]]:
    """The signed terms of a sum."""
    if n.op == "add":
        return terms(n.args[0]) + terms(n.args[1])
    if n.op == "neg":
        return [(-sign, t) for sign, t in terms(n.args[0])]
    return [(1, n)]


def total(parts: Sequence[tuple[int, Node]], axes: Axes) -> Node:
    """The sum of signed terms, positive ones first."""
    ordered = [p for p in parts if p[0] > 0] + [p for p in parts if p[0] < 0]
    if not ordered:
        return zero(axes)
    if all(sign < 0 for sign, _ in ordered) and len(ordered) > 1:
        return -total([(1, t) for _, t in ordered], axes)
    signed = [t if sign > 0 else -t for sign, t in ordered]
    out = signed[0]
    for t in signed[1:]:
        out = out + t
    return spread(out, axes)


def factors(n: Node) -> tuple[int, list[Node]]:
    """The sign and the factors of a product."""
    if n.op == "mul":
        (s, x), (t, y) = factors(n.args[0]), factors(n.args[1])
        return s * t, x + y
    if n.op == "neg":
        s, x = factors(n.args[0])
        return -s, x
    return 1, [n]


def product(sign: int, parts: Sequence[Node], axes: Axes) -> Node:
    """The product of the factors in order, spread to the given axes."""
    out = parts[0] if parts else const(1)
    for p in parts[1:]:
        out = out * p
    out = spread(out, axes)
    return -out if sign < 0 else out


def spread(n: Node, axes: Axes) -> Node:
    return n if n.axes == axes else node("spread", n, axes=axes)


def zero(axes: Axes) -> Node:
    return spread(const(0), axes)


def literal(n: Node) -> float | None:
    """The number that a constant holds everywhere, or None."""
    if n.op == "spread":
        return literal(n.args[0])
    return float(n.attr("value")) if n.op == "const" else None


def is_zero(n: Node) -> bool:
    return literal(n) == 0.0


# ---------------------------------------------------------------------------------------------------------------------
# Chunk form


def lift(expression: Node, axes: Axes) -> Node:
    """A token-level expression at chunk level: every input gains the chunk axis."""
    leaves = {n: leaf(n.attr("name"), ("C", *n.axes)) for n in topological([expression]) if n.op == "input"}
    return spread(substitute([expression], leaves)[expression], axes)


def chunkify(variant: Variant) -> Program:
    """The chunk form of the master recurrence with the variant's streams put in.

    ``x_L = x G`` and ``x_R = x / G`` with G the inclusive cumulative decay, as in the derivation page; the low-rank
    term in its solve form ``V2 = -(I + N)^-1 (L V + B_L S)``. Not yet fit for numbers: ``stabilize`` must follow.
    """
    streams = variant.streams()
    axes: dict[str, Axes] = {name: ("C", "V") if name == "v" else ("C", "K") for name in streams}
    axes["decay"] = ("C", *(streams["decay"].axes if streams["decay"].axes else ()))
    q, alpha, a, b, k, v = (lift(streams[s], axes[s]) for s in ("q", "decay", "a", "b", "k", "v"))
    g = node("log_decay", alpha)
    state = leaf("S", ("K", "V"))
    run = node("run", g, over="to")
    chunk_decay = exp(node("run", g, over="all"))
    ql, bl = param("scale") * q * exp(run), b * exp(run)
    kr, ar = k * exp(-run), a * exp(-run)

    def lower(x: Node, y: Node, strict: bool) -> Node:
        return node("mask", matmul(x, y, ty=True), strict=strict)

    qk, qa = lower(ql, kr, False), lower(ql, ar, False)
    bk, ba = lower(bl, kr, True), lower(bl, ar, True)
    v2 = -node("solve", ba, matmul(bk, v) + matmul(bl, state))
    o = matmul(ql, state) + matmul(qk, v) + matmul(qa, v2)
    kt, at = kr * chunk_decay, ar * chunk_decay
    new = state * chunk_decay + matmul(kt, v, tx=True) + matmul(at, v2, tx=True)
    # Where a = k makes two of these one value, the later name stays.
    names = {ql: "QL", bl: "BL", at: "AT", kt: "KT", qa: "Aqa", qk: "Aqk", bk: "Abk", ba: "N", v2: "V2", o: "O"}
    names |= {new: "S_next", chunk_decay: "Gc"}
    return Program(variant.name, (("o", o),), ((state, new, 1),), names)


def tokenize(variant: Variant) -> Program:
    """One token of the master recurrence with the variant's streams put in: the state before it to the state after."""
    streams = variant.streams()
    q, a, b, k = (spread(streams[s], ("K",)) for s in ("q", "a", "b", "k"))
    v, alpha = spread(streams["v"], ("V",)), streams["decay"]
    state = leaf("S", ("K", "V"))
    erased = node("sum", state * (alpha * b), axis="K")
    new = state * alpha + node("outer", k, v) - node("outer", a, erased)
    o = node("sum", new * (param("scale") * q), axis="K")
    return Program(f"{variant.name}_step", (("o", o), ("S_next", new)), (), {erased: "erased", new: "S_next", o: "o"})


# ---------------------------------------------------------------------------------------------------------------------
# The engine


def rewrite(program: Program, rules: Iterable[Rule]) -> tuple[Program, list[Fired]]:
    """Apply the rules bottom-up until nothing changes. Names move with what they name."""
    fired: list[Fired] = []
    rules = tuple(rules)
    for _ in range(100):
        program, new = _sweep(program, rules)
        if not new:
            verify(program)
            return program, fired
        fired += new
    raise IRError(f"{program.name}: rewriting does not end; last fired: {fired[-1]}")


def _sweep(program: Program, rules: tuple[Rule, ...]) -> tuple[Program, list[Fired]]:
    done: dict[Node, Node] = {}
    fired: list[Fired] = []
    labels: dict[Node, str] = {}
    for old in program.nodes():
        n = node(old.op, *(done[a] for a in old.args), **dict(old.attrs)) if old.args else old
        for _ in range(1000):
            for r in rules:
                new = r.apply(n)
                if new is None or new is n:
                    continue
                if new.axes != n.axes:
                    raise IRError(f"rule {r.name} changed axes of {show(n)} from {n.axes} to {new.axes}")
                fired.append(Fired(r.name, show(n, program.names), show(new, program.names)))
                if r.label and r.label not in (*program.names.values(), *labels.values()):
                    labels[new] = r.label
                n = new
                break
            else:
                break
        else:
            raise IRError(f"{program.name}: rewriting does not end; last fired: {fired[-1]}")
        done[old] = n
    mapped = _mapped(program, done)
    kept = {n: label for n, label in labels.items() if n not in mapped.names}
    return replace(mapped, names=dict(mapped.names) | kept), fired


def _mapped(program: Program, table: dict[Node, Node]) -> Program:
    names: dict[Node, str] = {}
    taken: set[str] = set()
    for n, label in program.names.items():
        new = table.get(n)
        if new is not None and new not in names and label not in taken and new.args and literal(new) is None:
            names[new] = label
            taken.add(label)
    carried = tuple((s, table[n], d) for s, n, d in program.carried)
    return replace(program, outputs=tuple((k, table[n]) for k, n in program.outputs), carried=carried, names=names)


# ---------------------------------------------------------------------------------------------------------------------
# Identities: always right, always simpler


@rule("constants", "an operation on literals is a literal")
def _constants(n: Node) -> Node | None:
    if not OPS[n.op].elementwise or not n.args:
        return None
    numbers = [literal(a) for a in n.args]
    if any(x is None for x in numbers):
        return None
    result = OPS[n.op].at_zero(*numbers)
    return None if result != result else spread(const(result), n.axes)


@rule("spread", "spreading to the axes that are there, or twice, is one spread or none")
def _spread(n: Node) -> Node | None:
    if n.op != "spread":
        return None
    x = n.args[0]
    if x.axes == n.axes:
        return x
    return spread(x.args[0], n.axes) if x.op == "spread" and len(n.axes) == len(n.attr("axes")) else None


@rule("bounds", "min(c, x) = min(x, c) and x /0 c = x / c for a number c")
def _bounds(n: Node) -> Node | None:
    if n.op == "minimum" and literal(n.args[0]) is not None and literal(n.args[1]) is None:
        return node("minimum", n.args[1], n.args[0])
    if n.op == "safe_div" and literal(n.args[1]) is not None:
        return zero(n.axes) if is_zero(n.args[1]) else node("div", *n.args)
    return None


@rule("units", "x + 0 = x, x * 1 = x, x * 0 = 0, x / 1 = x")
def _units(n: Node) -> Node | None:
    if n.op not in ("add", "mul", "div", "safe_div"):
        return None
    x, y = n.args
    if n.op == "add":
        if is_zero(x) or is_zero(y):
            return spread(y if is_zero(x) else x, n.axes)
        return None
    if n.op == "mul" and (is_zero(x) or is_zero(y)):
        return zero(n.axes)
    if n.op == "mul" and literal(x) == 1.0:
        return spread(y, n.axes)
    if literal(y) == 1.0:
        return spread(x, n.axes)
    return zero(n.axes) if n.op != "mul" and is_zero(x) else None


#: Operands that a sign leaves.
_SIGNED: dict[str, tuple[int, ...]] = {
    "solve": (1,),
    "solve_t": (1,),
    "gram": (0, 1),
    "gram_dx": (0, 1),
    "gram_dy": (0, 1),
    "gram_gain": (0, 1, 2),
    "gram_loss": (0, 1, 2),
}


@rule("signs", "a sign moves outward: -(-x) = x, (-x) y = -(x y), x @ (-y) = -(x @ y)")
def _signs(n: Node) -> Node | None:
    if n.op == "neg":
        x = n.args[0]
        return x.args[0] if x.op == "neg" else None
    if n.op in ("mul", "matmul", "div"):
        x, y = n.args
        if x.op == "neg" or y.op == "neg":
            inner = [a.args[0] if a.op == "neg" else a for a in n.args]
            out = node(n.op, *inner, **dict(n.attrs))
            return out if x.op == y.op == "neg" else -out
    # Not out of a running sum: a log-decay keeps its sign, by which a decay is told from a growth.
    if n.op in ("mask", "sum", "spread") and n.args[0].op == "neg":
        return -node(n.op, n.args[0].args[0], **dict(n.attrs))
    if n.op in _SIGNED:
        for i in _SIGNED[n.op]:
            if n.args[i].op == "neg":
                args = [*n.args[:i], n.args[i].args[0], *n.args[i + 1 :]]
                return -node(n.op, *args, **dict(n.attrs))
    return None


@rule("zeros", "a linear operation of 0 is 0")
def _zeros(n: Node) -> Node | None:
    linear = {"matmul": (0, 1), "mask": (0,), "run": (0,), "sum": (0,), "neg": (0,), "gram": (0, 1)}
    linear |= {
        "gram_dx": (0, 1),
        "gram_dy": (0, 1),
        "gram_gain": (0, 1, 2),
        "gram_loss": (0, 1, 2),
        "solve": (1,),
        "solve_t": (1,),
        "valid": (0,),
        "outer": (0, 1),
    }
    if n.op in linear and any(is_zero(n.args[i]) for i in linear[n.op]):
        return zero(n.axes)
    return None


@rule("log-exp", "log(exp(x)) = x")
def _log_exp(n: Node) -> Node | None:
    if n.op not in ("log", "log_decay"):
        return None
    x = n.args[0]
    if x.op == "spread" and x.args[0].op == "exp":
        return spread(x.args[0].args[0], n.axes)
    return x.args[0] if x.op == "exp" else None


def _positive(n: Node) -> bool:
    """Whether an expression is above 0, or 0 by underflow, whatever its inputs."""
    if n.op in ("mul", "div", "add", "spread"):
        return _complement(n) is not None or all(_positive(a) for a in n.args)
    number = literal(n)
    return n.op in ("exp", "sigmoid", "sqrt") or (number is not None and number > 0)


def _complement(n: Node) -> Node | None:
    """x if n is 1 - sigmoid(x)."""
    if n.op != "add" or literal(n.args[0]) != 1.0 or n.args[1].op != "neg" or n.args[1].args[0].op != "sigmoid":
        return None
    return n.args[1].args[0].args[0]


@rule("log-decay", "log(x y) = log x + log y, log sigmoid(x) in one: where a decay is 0, its logarithm is not infinite")
def _log_decay(n: Node) -> Node | None:
    if n.op not in ("log", "log_decay"):
        return None
    x = n.args[0]
    if x.op == "spread" and literal(x) is None:
        return spread(node(n.op, x.args[0]), n.axes)
    if x.op == "sigmoid":
        return node("log_sigmoid", x.args[0])
    one_less = _complement(x)
    if one_less is not None:
        return node("log_sigmoid", -one_less)
    if n.op == "log_decay" and x.op in ("mul", "div") and any(_positive(a) for a in x.args):
        first, second = (node("log_decay", a) for a in x.args)
        return spread(first + (second if x.op == "mul" else -second), n.axes)
    return None


@rule("spread-product", "a spread factor of a product broadcasts by itself")
def _spread_product(n: Node) -> Node | None:
    if n.op not in ("mul", "add"):
        return None
    for i in (0, 1):
        x, other = n.args[i], n.args[1 - i]
        if x.op == "spread" and other.axes == n.axes and literal(x) is None:
            pair = [x.args[0], other] if i == 0 else [other, x.args[0]]
            return node(n.op, *pair)
    return None


@rule("no-erase", "b = 0: I + 0 is the identity")
def _no_erase(n: Node) -> Node | None:
    return n.args[1] if n.op in ("solve", "solve_t") and is_zero(n.args[0]) else None


@rule("no-decay", "alpha = 1: nothing is summed, every decay is 1")
def _no_decay(n: Node) -> Node | None:
    return zero(n.axes) if n.op == "run" and is_zero(n.args[0]) else None


IDENTITIES = (
    _constants,
    _spread,
    _bounds,
    _units,
    _signs,
    _no_erase,
    _no_decay,
    _zeros,
    _log_exp,
    _log_decay,
    _spread_product,
)


# ---------------------------------------------------------------------------------------------------------------------
# Stabilize: no exponent of unbounded positive size is left


def _decay(n: Node, over: tuple[str, ...]) -> Node | None:
    """The log-decay g if n is exp of its running sum over one of the given runs."""
    if n.op == "exp" and n.args[0].op == "run" and n.args[0].attr("over") in over:
        return n.args[0].args[0]
    return None


def _growth(n: Node) -> Node | None:
    """The log-decay g if n is exp(-sum of g up to here): a quantity that must not be formed."""
    if n.op == "exp" and n.args[0].op == "neg":
        return _decay(exp(n.args[0].args[0]), ("to",))
    return None


def _without(parts: list[Node], index: int) -> list[Node]:
    return parts[:index] + parts[index + 1 :]


@rule("absorb-gate", "b = d / alpha: B_L at r is d_r times the decay up to r-1, nothing is divided")
def _absorb(n: Node) -> Node | None:
    if n.op != "mul":
        return None
    sign, parts = factors(n)
    for i, quotient in enumerate(parts):
        if quotient.op != "div":
            continue
        top, bottom = quotient.args
        alpha = bottom.args[0] if bottom.op == "spread" else bottom
        if alpha.op != "exp":
            continue
        for m, decay in enumerate(parts):
            if _decay(decay, ("to",)) is alpha.args[0]:
                before = exp(node("run", alpha.args[0], over="before"))
                rest = [before if s == m else top if s == i else p for s, p in enumerate(parts)]
                return product(sign, rest, n.axes)
    return None


@rule("absorb-quotient", "(d / alpha) alpha = d: nothing is divided")
def _absorb_quotient(n: Node) -> Node | None:
    if n.op != "mul":
        return None
    sign, parts = factors(n)
    for i, quotient in enumerate(parts):
        if quotient.op == "div" and quotient.args[1] in parts:
            m = parts.index(quotient.args[1])
            rest = [quotient.args[0] if s == i else p for s, p in enumerate(parts) if s != m]
            return product(sign, rest, n.axes)
    return None


ABSORB = (_absorb_quotient,)


@rule("tail-decay", "(x / G) Gc = x times the decay of the tokens after it")
def _tail(n: Node) -> Node | None:
    if n.op != "mul":
        return None
    sign, parts = factors(n)
    for i, x in enumerate(parts):
        g = _growth(x)
        if g is None:
            continue
        for m, y in enumerate(parts):
            if _decay(y, ("all",)) is g:
                after = exp(node("run", g, over="after"))
                return product(sign, [after if s == i else p for s, p in enumerate(parts) if s != m], n.axes)
    return None


@rule("pair-decay", "(x G) (y / G)^T under the mask is a Gram product decayed over the tokens between")
def _pair(n: Node) -> Node | None:
    if n.op != "mask" or n.args[0].op != "matmul":
        return None
    x, y = n.args[0].args
    if n.args[0].attr("tx") or not n.args[0].attr("ty"):
        return None
    (sx, left), (sy, right) = factors(x), factors(y)
    for i, grow in enumerate(right):
        g = _growth(grow)
        if g is None:
            continue
        for over in ("to", "before"):
            for m, shrink in enumerate(left):
                if _decay(shrink, (over,)) is g:
                    px, py = product(sx, _without(left, m), x.axes), product(sy, _without(right, i), y.axes)
                    return node("gram", px, py, g, left=over, strict=n.attr("strict"))
    return None


STABILIZE = (_absorb, _tail, _pair)


def stabilized(program: Program) -> None:
    """IRError if an exponential of unbounded positive size, or a division by a decay or a part of one, is left."""
    for n in unbounded_exponents(program):
        raise IRError(f"{program.name}: {show(n)} has an exponent of unbounded size")
    order = program.nodes()
    logs = {key for n in order if n.op == "run" for key in _log_terms(n.args[0])}
    for n in order:
        if n.op == "exp" and n.args[0].op != "run" and {(-s, core) for s, core in _log_terms(n.args[0])} & logs:
            raise IRError(f"{program.name}: {show(n)} has an exponent of unbounded size: it undoes a part of the decay")
        if n.op in ("div", "safe_div") and set(_logs_of(n.args[1])) & logs:
            raise IRError(
                f"{program.name}: {show(n)} divides by a decay that may underflow to 0; "
                "write the decay as one exp, and an erase vector over it as divided by that very exp"
            )


def _log_terms(e: Node) -> Iterator[tuple[int, tuple[str, ...]]]:
    """The terms of a log-decay, each as its sign and its factors but for numbers; those under a minimum too."""
    for sign, term in terms(e):
        side, parts = factors(term)
        bare = [p.args[0] if p.op == "spread" else p for p in parts]
        numbers = [x for x in map(literal, bare) if x is not None]
        side *= sign * (-1 if sum(x < 0 for x in numbers) % 2 else 1)
        kept = [p for p in bare if literal(p) is None]
        if len(kept) == 1 and kept[0].op in ("minimum", "add", "neg"):
            for a in kept[0].args if kept[0].op == "minimum" else kept:
                yield from ((side * s, core) for s, core in _log_terms(a))
        elif kept:
            yield side, tuple(sorted(map(show, kept)))


def _logs_of(x: Node) -> Iterator[tuple[int, tuple[str, ...]]]:
    """The same of the logarithm of a product of decays."""
    for p in factors(x)[1]:
        part = p.args[0] if p.op == "spread" else p
        if part.op == "exp":
            yield from _log_terms(part.args[0])
        elif part.op == "div":
            yield from _logs_of(part.args[0])
        elif literal(part) is None:
            for op in ("log", "log_decay", "log_sigmoid"):
                yield from _log_terms(node(op, part.args[0] if op == "log_sigmoid" and part.op == "sigmoid" else part))


# ---------------------------------------------------------------------------------------------------------------------
# Folds


def _same_product(x: Node, y: Node) -> bool:
    return x.op == y.op == "matmul" and x.args[0] is y.args[0] and x.attrs == y.attrs


@rule("merge-products", "P X + P Y = P (X + Y)")
def _merge(n: Node) -> Node | None:
    if n.op != "add":
        return None
    parts = terms(n)
    for i, (si, x) in enumerate(parts):
        for m in range(i + 1, len(parts)):
            sm, y = parts[m]
            if _same_product(x, y):
                inner = total([(1, x.args[1]), (si * sm, y.args[1])], x.args[1].axes)
                merged = node("matmul", x.args[0], inner, **dict(x.attrs))
                rest = [p for s, p in enumerate(parts) if s not in (i, m)]
                return total([(si, merged), *rest], n.axes)
    return None


@rule("absorb-solve", "X - (I + N)^-1 (N X + Z) = (I + N)^-1 (X - Z)", "Vnew")
def _absorb_solve(n: Node) -> Node | None:
    if n.op != "add":
        return None
    parts = terms(n)
    for i, (si, solved) in enumerate(parts):
        if solved.op != "solve":
            continue
        lower, inside = solved.args[0], terms(solved.args[1])
        side, core = (-1, lower.args[0]) if lower.op == "neg" else (1, lower)
        for m, (sm, x) in enumerate(parts):
            if m == i or sm == si:
                continue
            for p, (sp, t) in enumerate(inside):
                if sp == side and t.op == "matmul" and t.args[0] is core and t.args[1] is x and not t.attr("tx"):
                    rest = [(-s, z) for q, (s, z) in enumerate(inside) if q != p]
                    merged = node("solve", lower, total([(1, x), *rest], x.axes))
                    kept = [term for s, term in enumerate(parts) if s not in (i, m)]
                    return total([(sm, merged), *kept], n.axes)
    return None


@rule("mask-once", "a mask over what it already masks changes nothing")
def _mask_once(n: Node) -> Node | None:
    if n.op == "mask" and n.args[0].op in ("mask", "gram", "pair"):
        x = n.args[0]
        if x.attr("strict") or not n.attr("strict"):
            return x
    return None


@rule("mask-inside", "a decayed Gram product's derivatives read the pairs below the diagonal only")
def _mask_inside(n: Node) -> Node | None:
    if n.op not in ("gram_dx", "gram_dy", "gram_gain", "gram_loss") or n.args[0].op != "mask":
        return None
    return node(n.op, n.args[0].args[0], *n.args[1:], **dict(n.attrs))


FOLD = (_merge, _absorb_solve, _mask_once, _mask_inside)


# ---------------------------------------------------------------------------------------------------------------------
# Linear: sums of like operations are one operation on the sum (what a reverse walk leaves behind)


@rule("merge-linear", "sums of running sums, of reductions, of spreads, are one of the sum")
def _merge_linear(n: Node) -> Node | None:
    if n.op != "add":
        return None
    parts = terms(n)
    for i, (si, x) in enumerate(parts):
        for m in range(i + 1, len(parts)):
            sm, y = parts[m]
            like = x.op in ("run", "sum", "spread") and x.op == y.op and x.attrs == y.attrs
            if like and x.args[0].axes == y.args[0].axes:
                inner = total([(1, x.args[0]), (si * sm, y.args[0])], x.args[0].axes)
                rest = [p for s, p in enumerate(parts) if s not in (i, m)]
                return total([(si, node(x.op, inner, **dict(x.attrs))), *rest], n.axes)
    return None


@rule("merge-factors", "x a + x b = x (a + b)")
def _merge_factors(n: Node) -> Node | None:
    if n.op != "add":
        return None
    parts = terms(n)
    for i, (si, x) in enumerate(parts):
        for m in range(i + 1, len(parts)):
            sm, y = parts[m]
            if x.op != "mul" or y.op != "mul":
                continue
            for s in (0, 1):
                for t in (0, 1):
                    shared = x.args[s] is y.args[t] and x.args[1 - s].axes == y.args[1 - t].axes
                    if shared and literal(x.args[s]) is None and not _is_decay(x.args[s]):
                        inner = total([(1, x.args[1 - s]), (si * sm, y.args[1 - t])], x.args[1 - s].axes)
                        rest = [p for u, p in enumerate(parts) if u not in (i, m)]
                        return total([(si, x.args[s] * inner), *rest], n.axes)
    return None


def _is_decay(n: Node) -> bool:
    return n.op == "exp" and n.args[0].op == "run"


@rule("distribute-decay", "(x + y) e = x e + y e for a decay e: each product is a gradient of its own")
def _distribute_decay(n: Node) -> Node | None:
    if n.op != "mul":
        return None
    for i in (0, 1):
        x, decay = n.args[i], n.args[1 - i]
        if _is_decay(decay) and x.op == "add" and all(a.axes == n.axes for a in x.args):
            return total([(sign, t * decay) for sign, t in terms(x)], n.axes)
    return None


@rule("order-factors", "cotangents and decays are multiplied first: that product is a gradient of its own, and shared")
def _order_factors(n: Node) -> Node | None:
    if n.op != "mul":
        return None
    parts = _gradient_factors(n)
    late = [p for p in parts if _token_wise(p)]
    early = [p for p in parts if p not in late]
    if len(parts) < 3 or not late or len(early) < 2:
        return None
    out = product(1, [*early, *late], n.axes)
    return None if out is n else out


def _gradient_factors(n: Node) -> list[Node]:
    """The factors of a product, with what one token's inputs make left whole."""
    if n.op != "mul" or _token_wise(n):
        return [n]
    return _gradient_factors(n.args[0]) + _gradient_factors(n.args[1])


def _token_wise(n: Node) -> bool:
    """Whether a value is formed from one token's inputs: no cotangent, no running sum."""
    mixing = ("run", "matmul", "gram", "gram_dx", "gram_dy", "gram_gain", "gram_loss")
    return all(m.op not in mixing for m in topological([n])) and not any(
        m.op == "input" and m.attr("name") in ("do", "dS", "S") for m in topological([n])
    )


@rule("gather-trees", "derivatives of decayed Gram products that are summed are summed first, in one order")
def _gather_trees(n: Node) -> Node | None:
    if n.op != "add":
        return None
    parts = terms(n)
    together = []
    for kind in (("gram_dx",), ("gram_dy",), ("gram_gain", "gram_loss")):
        trees = sorted(((show(t), sign, i) for i, (sign, t) in enumerate(parts) if t.op in kind))
        if len(trees) > 1:
            lead = trees[0][1]
            together.append((lead, total([(sign * lead, parts[i][1]) for _, sign, i in trees], n.axes), kind))
    if all(whole in _sums_within(n) for _, whole, _ in together):
        return None
    kinds = {op for _, _, kind in together for op in kind}
    rest = [p for p in parts if p[1].op not in kinds]
    return total([*rest, *((sign, whole) for sign, whole, _ in together)], n.axes)


def _sums_within(n: Node) -> set[Node]:
    """Every partial sum that a sum is written with."""
    out: set[Node] = set()
    stack = [n]
    while stack:
        m = stack.pop()
        if m.op in ("add", "neg"):
            out.add(m)
            stack.extend(m.args)
    return out


LINEAR = (_distribute_decay, _order_factors, _merge_linear, _merge_factors, _gather_trees)


# ---------------------------------------------------------------------------------------------------------------------
# Hoist: move products out of the part that is sequential over chunks


def hoist_rules(carried: Iterable[Node]) -> tuple[Rule, ...]:
    """Rules that take work off the carried states' path; ``carried`` are the state leaves."""
    states = frozenset(carried)
    memo: dict[Node, bool] = {}

    def sequential(n: Node) -> bool:
        for m in topological([n], frozenset(memo)):
            if m not in memo:
                memo[m] = m in states or any(memo[a] for a in m.args)
        return memo[n]

    @rule("hoist-solve", "(I + N)^-1 (X - Y S) = (I + N)^-1 X - ((I + N)^-1 Y) S: solve before the scan")
    def hoist_solve(n: Node) -> Node | None:
        if n.op != "solve":
            return None
        lower, parts = n.args[0], terms(n.args[1])
        if sequential(lower) or not sequential(n.args[1]):
            return None
        moved: list[tuple[int, Node]] = []
        for sign, t in parts:
            if not sequential(t):
                moved.append((sign, node(n.op, lower, t)))
            elif t.op == "matmul" and not sequential(t.args[0]) and not t.attr("tx") and not t.attr("ty"):
                moved.append((sign, matmul(node(n.op, lower, t.args[0]), t.args[1])))
            else:
                return None
        return total(moved, n.axes)

    @rule("hoist-adjoint", "Y^T (I + N)^-T X = ((I + N)^-1 Y)^T X: solve before the scan")
    def hoist_adjoint(n: Node) -> Node | None:
        if n.op != "matmul" or not n.attr("tx") or n.attr("ty"):
            return None
        y, x = n.args
        if x.op != "solve_t" or not sequential(x.args[1]) or sequential(y) or sequential(x.args[0]):
            return None
        return matmul(node("solve", x.args[0], y), x.args[1], tx=True)

    return (hoist_solve, hoist_adjoint)


# ---------------------------------------------------------------------------------------------------------------------
# Lower: what the machine does


@rule("row-scale", "b = beta k: the row scale leaves the Gram product, which keeps the exact values of the input")
def _row_scale(n: Node) -> Node | None:
    return _outside(n, lambda p: p.axes in (("C",), ()) and literal(p) is None and p.op != "param")


@rule("scale", "scale q: so does a number, whose product with q 16 bits would round")
def _scale(n: Node) -> Node | None:
    return _outside(n, lambda p: p.op == "param")


def _outside(n: Node, leaves: Callable[[Node], bool]) -> Node | None:
    """A Gram product without the factors of its left operand that leave it."""
    plain_gram = n.op == "matmul" and n.axes == ("C", "C") and n.attr("ty") and not n.attr("tx")
    if n.op != "gram" and not plain_gram:
        return None
    sign, parts = factors(n.args[0])
    outside = [p for p in parts if leaves(p)]
    rest = [p for p in parts if p not in outside]
    if not outside or not rest:
        return None
    plain = node(n.op, product(sign, rest, n.args[0].axes), *n.args[1:], **dict(n.attrs))
    return product(1, [*outside, plain], n.axes)


@rule("head-decay", "alpha one number a head: a plain product times the decay of each pair")
def _head_decay(n: Node) -> Node | None:
    if n.op not in ("gram", "gram_dx", "gram_dy") or n.args[2].axes != ("C",):
        return None
    x, y, g = n.args
    decay = node("pair", g, **dict(n.attrs))
    if n.op == "gram":
        return decay * matmul(x, y, ty=True)
    return matmul(decay * x, y, tx=n.op == "gram_dy")


@rule("invert", "(I + N)^-1 is formed once a chunk")
def _invert(n: Node) -> Node | None:
    if n.op not in ("solve", "solve_t"):
        return None
    return matmul(node("inverse", n.args[0]), n.args[1], tx=n.op == "solve_t")


@rule("column-scale", "E (s X) = (E diag(s)) X: X keeps the exact values of the input")
def _column_scale(n: Node) -> Node | None:
    if n.op != "matmul" or n.args[0].op != "inverse" or n.attr("tx"):
        return None
    sign, parts = factors(n.args[1])
    rows = [p for p in parts if p.axes == ("C",) and _token_wise(p)]
    rest = [p for p in parts if p not in rows]
    if not rows or not rest or sign < 0:
        return None
    scaled = node("columns", n.args[0], product(1, rows, ("C",)))
    return matmul(scaled, product(1, rest, n.args[1].axes))


@rule("token-scale", "(s X) S = s (X S), (s X)^T Y = X^T (s Y): X keeps the exact values of the input")
def _token_scale(n: Node) -> Node | None:
    if n.op != "matmul" or n.args[0].axes != ("C", "K") or n.axes not in (("C", "V"), ("K", "V")):
        return None
    sign, parts = factors(n.args[0])
    tiles = [p for p in parts if p.axes == ("C", "K")]
    scales = [p for p in parts if p not in tiles]
    if not scales or len(tiles) != 1 or tiles[0].op != "input" or not all(p.axes in (("C",), ()) for p in scales):
        return None
    x, y = tiles[0], n.args[1]
    if n.axes == ("K", "V") and y.op != "input":
        return None  # new values: other products take them unscaled
    if n.axes == ("C", "V"):
        return product(sign, [*scales, node("matmul", x, y, **dict(n.attrs))], n.axes)
    return node("matmul", x, product(sign, [*scales, y], y.axes), **dict(n.attrs))


LOWER = (_row_scale, _scale, _head_decay, _invert, _column_scale, _token_scale)


# ---------------------------------------------------------------------------------------------------------------------
# Padding

#: What a value may hold in the padding beside a known number: some finite number.
_FREE = math.inf


def in_padding(n: Node, axis: str, memo: dict[tuple[Node, str], float]) -> float:
    """What the node holds in the padding of an axis: a number, ``_FREE`` for a finite one, NaN if perhaps not finite.

    A tensor with the axis is read as 0 there; one without it holds what it holds.
    """
    for m in topological([n]):
        if (m, axis) not in memo:
            memo[m, axis] = _in_padding(m, axis, [memo[a, axis] for a in m.args])
    return memo[n, axis]


def _in_padding(n: Node, axis: str, args: list[float]) -> float:
    if n.op == "input":
        return 0.0 if axis in n.axes else _FREE
    if n.op == "param":
        return _FREE
    if any(math.isnan(x) for x in args):
        return math.nan
    if n.op == "mul" and 0.0 in args:
        return 0.0
    if n.op in ("div", "safe_div") and args[0] == 0.0 and args[1] != 0.0:
        return 0.0
    if OPS[n.op].elementwise or n.op == "const":
        return _FREE if _FREE in args else OPS[n.op].at_zero(*args, **dict(n.attrs))
    if n.op in ("spread", "neg"):
        return args[0]
    if n.op == "valid":
        return 0.0 if axis in n.axes else args[0]
    kept = [x for a, x in zip(n.args, args, strict=True) if axis in a.axes]
    if axis not in n.axes or not kept or n.op in ("pair", "inverse"):
        return _FREE
    if n.op == "run" and axis == "C" and n.attr("over") not in ("after", "from"):
        return _FREE
    if n.op == "matmul" and n.axes.count(axis) == 1:
        side = 0 if n.axes[0] == axis else 1
        return 0.0 if args[side] == 0.0 else _FREE
    if n.op in ("solve", "solve_t"):
        return 0.0 if args[1] == 0.0 else _FREE
    if n.op in ("gram_dx", "gram_dy"):
        return 0.0 if args[0 if axis == "C" else 1] == 0.0 else _FREE
    if n.op in ("gram_gain", "gram_loss"):
        own = 1 if n.op == "gram_gain" else 2
        return 0.0 if 0.0 in ((args[0], args[own]) if axis == "C" else args[1:3]) else _FREE
    return 0.0 if all(x == 0.0 for x in kept[:2]) else _FREE


def _mixed(n: Node) -> list[tuple[int, str]]:
    """The operands, and the axis of each, whose elements an operation combines."""
    if n.op == "sum":
        return [(0, n.attr("axis"))]
    if n.op == "matmul":
        inner = n.args[0].axes[0 if n.attr("tx") else 1]
        return [(0, inner), (1, inner)]
    if n.op == "gram":
        return [(0, "K"), (1, "K"), (2, "C")]
    if n.op in ("gram_dx", "gram_dy"):
        return [(0, "C"), (1, "C"), (2, "C")]
    if n.op in ("gram_gain", "gram_loss"):
        return [(0, "C"), (1, "C"), (2, "C"), (3, "C")]
    if n.op in ("run", "pair", "inverse"):
        return [(0, "C")]
    return [(1, "C")] if n.op in ("solve", "solve_t") else []


def mask_padding(program: Program) -> Program:
    """Zero the padding where an operation that combines tokens or channels would read something else there.

    A product needs one side 0 and the other finite.
    """
    memo: dict[tuple[Node, str], float] = {}
    done: dict[Node, Node] = {}
    for old in program.nodes():
        args = [done[a] for a in old.args]
        held = {i: in_padding(args[i], axis, memo) for i, axis in _mixed(old)}
        product_of = OPS[old.op].cost == "product"
        safe = product_of and 0.0 in (held[0], held[1]) and not math.isnan(held[0] + held[1])
        for i, x in held.items():
            if x != 0.0 and not (safe and i < 2):
                args[i] = node("valid", args[i])
        done[old] = node(old.op, *args, **dict(old.attrs)) if args else old
    return _mapped(program, done)


# ---------------------------------------------------------------------------------------------------------------------
# Counts


def count(program: Program) -> dict[str, int]:
    """Tile products, solves (or inverses) and exponentials of a program, counted once each."""
    order = program.nodes()
    products = sum(n.op in ("matmul", "gram", "gram_dx", "gram_dy") for n in order)
    solves = sum(n.op in ("solve", "solve_t", "inverse") for n in order)
    return {"products": products, "solves": solves, "exponentials": sum(n.op in ("exp", "pair") for n in order)}
