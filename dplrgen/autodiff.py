"""The backward, by differentiating a program: one rule an op and a reverse walk.

A rule takes the node and the cotangent of its value and gives one cotangent an operand (None where none flows).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from dplrgen.errors import IRError
from dplrgen.ir import Axes, Node, const, matmul, node, safe_div, show, sigmoid, topological
from dplrgen.passes import spread, zero

__all__ = ["VJP", "gradient", "vjp"]

Rule = Callable[[Node, Node], Sequence[Node | None]]

#: Derivative rules by op.
VJP: dict[str, Rule] = {}


def vjp(op: str) -> Callable[[Rule], Rule]:
    """Register the derivative rule of an op."""

    def add(rule: Rule) -> Rule:
        VJP[op] = rule
        return rule

    return add


def gradient(seeds: Mapping[Node, Node], wrt: Sequence[Node]) -> dict[Node, Node]:
    """Cotangents of ``wrt`` (zero where a value does not matter) and of what lies between, given those of the seeds."""
    wanted = set(wrt)
    live: set[Node] = set()
    order = topological(seeds)
    for n in order:
        if n in wanted or any(a in live for a in n.args):
            live.add(n)
    cotangents: dict[Node, Node] = dict(seeds)
    for n in reversed(order):
        d = cotangents.get(n)
        if d is None or n not in live or not n.args:
            continue
        if n.op not in VJP:
            raise IRError(f"op {n.op!r} has no derivative rule: {show(n)}")
        for operand, part in zip(n.args, VJP[n.op](n, d), strict=True):
            if part is None or operand not in live:
                continue
            part = fit(part, operand.axes)
            cotangents[operand] = cotangents[operand] + part if operand in cotangents else part
    return cotangents | {n: cotangents.get(n, zero(n.axes)) for n in wrt}


def fit(d: Node, axes: Axes) -> Node:
    """Undo a broadcast: sum over the axes that the operand lacks, spread over those that the cotangent lacks."""
    if d.axes == ("C", "C") and axes == ("C",):
        return node("sum", d, axis="C")
    for axis in reversed(d.axes):
        if axis not in axes:
            d = node("sum", d, axis=axis)
    return spread(d, axes)


@vjp("add")
def _add(n: Node, d: Node) -> Sequence[Node | None]:
    return spread(d, n.axes), spread(d, n.axes)


@vjp("mul")
def _mul(n: Node, d: Node) -> Sequence[Node | None]:
    x, y = n.args
    return d * y, d * x


@vjp("neg")
def _neg(n: Node, d: Node) -> Sequence[Node | None]:
    return (-d,)


@vjp("div")
def _div(n: Node, d: Node) -> Sequence[Node | None]:
    y = n.args[1]
    return d / y, -(d * n / y)


@vjp("safe_div")
def _safe_div(n: Node, d: Node) -> Sequence[Node | None]:
    y = n.args[1]
    return safe_div(d, y), -safe_div(d * n, y)


@vjp("exp")
def _exp(n: Node, d: Node) -> Sequence[Node | None]:
    return (d * n,)


@vjp("log")
def _log(n: Node, d: Node) -> Sequence[Node | None]:
    return (d / n.args[0],)


@vjp("log_decay")
def _log_decay(n: Node, d: Node) -> Sequence[Node | None]:
    return (safe_div(d, node("above", n.args[0])),)


@vjp("log_sigmoid")
def _log_sigmoid(n: Node, d: Node) -> Sequence[Node | None]:
    return (d * sigmoid(-n.args[0]),)


@vjp("sqrt")
def _sqrt(n: Node, d: Node) -> Sequence[Node | None]:
    return (safe_div(0.5 * d, n),)


@vjp("sigmoid")
def _sigmoid(n: Node, d: Node) -> Sequence[Node | None]:
    return (d * n * (1.0 - n),)


@vjp("minimum")
def _minimum(n: Node, d: Node) -> Sequence[Node | None]:
    first = node("is_first", *n.args)
    return d * first, d * (const(1) - first)


@vjp("sum")
def _sum(n: Node, d: Node) -> Sequence[Node | None]:
    return (spread(d, n.args[0].axes),)


@vjp("spread")
def _spread(n: Node, d: Node) -> Sequence[Node | None]:
    return (d,)


@vjp("valid")
def _valid(n: Node, d: Node) -> Sequence[Node | None]:
    return (node("valid", d),)


@vjp("matmul")
def _matmul(n: Node, d: Node) -> Sequence[Node | None]:
    x, y = n.args
    tx, ty = bool(n.attr("tx")), bool(n.attr("ty"))
    dx = matmul(y, d, tx=ty, ty=True) if tx else matmul(d, y, ty=not ty)
    dy = matmul(d, x, tx=True, ty=tx) if ty else matmul(x, d, tx=not tx)
    return dx, dy


@vjp("mask")
def _mask(n: Node, d: Node) -> Sequence[Node | None]:
    return (node("mask", d, strict=n.attr("strict")),)


_ADJOINT_RUN = {"to": "from", "from": "to", "before": "after", "after": "before"}


@vjp("run")
def _run(n: Node, d: Node) -> Sequence[Node | None]:
    over = n.attr("over")
    if over == "all":
        return (spread(d, n.args[0].axes),)
    return (node("run", d, over=_ADJOINT_RUN[over]),)


@vjp("gram")
def _gram(n: Node, d: Node) -> Sequence[Node | None]:
    """The decay of a pair (i, j) is a sum of g over j+1..i (i-1): what row i gains and column j loses, summed back.

    A pair that lies beyond a token is in both sums and cancels there, so both shares are formed from the factors as the
    products take them. The diagonal has no decay; left in, its two equal shares would cancel in the gate's gradient
    with a rounding error.
    """
    x, y, g = n.args
    attrs = dict(n.attrs) | {"strict": True}
    dx, dy = node("gram_dx", d, y, g, **attrs), node("gram_dy", d, x, g, **attrs)
    if g.axes == x.axes:
        gained, lost = node("gram_gain", d, x, y, g, **attrs), node("gram_loss", d, x, y, g, **attrs)
    else:
        gained, lost = fit(node("taken", x) * dx, g.axes), fit(node("taken", y) * dy, g.axes)
    left = "from" if attrs["left"] == "to" else "after"
    dg = node("run", gained, over=left) - node("run", lost, over="from")
    if n.attr("strict"):
        return dx, dy, dg
    diagonal = node("diagonal", d)
    return dx + diagonal * y, dy + diagonal * x, dg


@vjp("solve")
def _solve(n: Node, d: Node) -> Sequence[Node | None]:
    dx = node("solve_t", n.args[0], d)
    return -node("mask", matmul(dx, n, ty=True), strict=True), dx
