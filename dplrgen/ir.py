"""The intermediate representation: one annotated op vocabulary, interned expression nodes, programs.

A *node* is an operation on other nodes, with attributes and named axes. Two levels share the class:

- token level: what a variant's binding is written in. Axes are ``()``, ``("K",)`` or ``("V",)``, one token of one head.
- chunk level: the same expressions with a leading chunk axis ``"C"``, products of tiles, running sums over the chunk's
  tokens, and the carried state ``("K", "V")``.

Nodes are interned: equal expressions are one object, so common subexpressions are shared by construction and
identity is equality. A *program* is an ordered set of named outputs; it prints in static single assignment form.

Axis symbols: ``C`` tokens of a chunk, ``K`` key channels, ``V`` value channels. A one-axis operand of an elementwise op
broadcasts against a two-axis one by name; against ``(C, C)`` it scales rows.
"""

from __future__ import annotations

import math
import numbers
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from dplrgen.errors import IRError

__all__ = [
    "OPS",
    "Axes",
    "Node",
    "Op",
    "Program",
    "const",
    "constants",
    "descendants",
    "dot",
    "exp",
    "gate",
    "key",
    "leaf",
    "log",
    "matmul",
    "minimum",
    "node",
    "norm",
    "param",
    "register",
    "safe_div",
    "show",
    "sigmoid",
    "sqrt",
    "substitute",
    "topological",
    "unbounded_exponents",
    "unwrapped",
    "value",
    "verify",
]

Axes = tuple[str, ...]
Attrs = tuple[tuple[str, Any], ...]


# ---------------------------------------------------------------------------------------------------------------------
# Operations


@dataclass(frozen=True)
class Op:
    """One operation.

    ``infer`` maps the operands' axes and the attributes to the result's axes and raises IRError on a misfit.
    ``torch`` and ``triton`` are format strings over the operands ``{0}``, ``{1}`` and the attributes by name; both are
    given for elementwise ops only (tile operations are lowered by the emitters' own tables). ``at_zero`` computes the
    value the operation takes when its operands take the given scalars: it tells what padding holds.
    """

    name: str
    arity: int
    infer: Callable[[tuple[Axes, ...], dict[str, Any]], Axes]
    show: str
    torch: str = ""
    triton: str = ""
    at_zero: Callable[..., float] = lambda *args, **attrs: math.nan
    cost: str = "cheap"  # cheap: elementwise and running sums; product: matrix units; solve: triangular inverse

    @property
    def elementwise(self) -> bool:
        return bool(self.torch)


OPS: dict[str, Op] = {}


def register(op: Op) -> Op:
    """Add an operation to the vocabulary; its derivative rule goes into ``autodiff.VJP`` under the same name."""
    if op.name in OPS:
        raise IRError(f"op {op.name!r} is already registered")
    OPS[op.name] = op
    return op


# ---------------------------------------------------------------------------------------------------------------------
# Nodes


class Node:
    """An interned operation on nodes. Build with :func:`node` or the operators; never mutate."""

    __slots__ = ("__weakref__", "args", "attrs", "axes", "op")
    op: str
    args: tuple[Node, ...]
    attrs: Attrs
    axes: Axes

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"nodes are frozen: cannot set {name!r}")

    def attr(self, name: str) -> Any:
        return dict(self.attrs)[name]

    def __add__(self, other: Node | float) -> Node:
        return node("add", self, _lift(other))

    def __radd__(self, other: float) -> Node:
        return node("add", _lift(other), self)

    def __sub__(self, other: Node | float) -> Node:
        return node("add", self, node("neg", _lift(other)))

    def __rsub__(self, other: float) -> Node:
        return node("add", _lift(other), node("neg", self))

    def __mul__(self, other: Node | float) -> Node:
        return node("mul", self, _lift(other))

    def __rmul__(self, other: float) -> Node:
        return node("mul", _lift(other), self)

    def __truediv__(self, other: Node | float) -> Node:
        return node("div", self, _lift(other))

    def __rtruediv__(self, other: float) -> Node:
        return node("div", _lift(other), self)

    def __neg__(self) -> Node:
        return node("neg", self)

    def __repr__(self) -> str:
        return show(self)


_TABLE: weakref.WeakValueDictionary[tuple[Any, ...], Node] = weakref.WeakValueDictionary()


def node(op: str, *args: Node, **attrs: Any) -> Node:
    """The interned node ``op(*args, **attrs)``; IRError if the operands do not fit the operation."""
    spec = OPS.get(op)
    if spec is None:
        raise IRError(f"unknown op {op!r}")
    if len(args) != spec.arity:
        raise IRError(f"{op} takes {spec.arity} operands, got {len(args)}")
    frozen = tuple(sorted(attrs.items()))
    table_key = (op, tuple(id(a) for a in args), frozen, tuple(type(v) for _, v in frozen))
    found = _TABLE.get(table_key)
    if found is not None:
        return found
    try:
        axes = spec.infer(tuple(a.axes for a in args), attrs)
    except IRError as error:
        operands = ", ".join(f"{show(a)} {_axes_text(a.axes)}" for a in args)
        raise IRError(f"{op}({operands}): {error}") from None
    made = object.__new__(Node)
    for name, item in (("op", op), ("args", args), ("attrs", frozen), ("axes", axes)):
        object.__setattr__(made, name, item)
    _TABLE[table_key] = made
    return made


def _lift(value: Node | float) -> Node:
    """A number as a constant."""
    given: Any = value  # what a caller passes, whatever the annotation says
    if isinstance(given, Node):
        return given
    if isinstance(given, bool) or not isinstance(given, numbers.Real):
        raise IRError(f"expected an expression or a number, got {given!r}")
    try:
        return const(float(given))
    except OverflowError:
        raise IRError(f"a constant must be finite, got {given}") from None


def _axes_text(axes: Axes) -> str:
    return "[" + ", ".join(axes) + "]"


def show(root: Node, names: Mapping[Node, str] | None = None, limit: int = 1000) -> str:
    """The expression as text; nodes in ``names`` other than the root print as their name.

    What is shared is written out each time, so a text may be far longer than the expression is large: after ``limit``
    operations the rest is left out.
    """
    names = names or {}
    left = limit

    def text(n: Node, top: bool) -> str:
        nonlocal left
        left -= 1
        if left < 0:
            return "..."
        if not top and n in names:
            return names[n]
        spec = OPS[n.op]
        return spec.show.format(*(text(a, False) for a in n.args), **dict(n.attrs))

    return unwrapped(text(root, True))


def unwrapped(text: str) -> str:
    """The expression without parentheses around the whole of it."""
    if not (text.startswith("(") and text.endswith(")")):
        return text
    depth = 0
    for position, character in enumerate(text):
        depth += {"(": 1, ")": -1}.get(character, 0)
        if depth == 0 and position < len(text) - 1:
            return text
    return text[1:-1]


# ---------------------------------------------------------------------------------------------------------------------
# Axis rules


def _broadcast(operands: tuple[Axes, ...], attrs: dict[str, Any]) -> Axes:
    out: Axes = ()
    for axes in operands:
        if len(axes) > len(out):
            out = axes
    for axes in operands:
        if axes == out or not axes or (len(axes) == 1 and axes[0] in out):
            continue
        raise IRError(f"axes {_axes_text(axes)} do not broadcast against {_axes_text(out)}")
    return out


def _given(operands: tuple[Axes, ...], attrs: dict[str, Any]) -> Axes:
    return tuple(attrs["axes"])


def _none(operands: tuple[Axes, ...], attrs: dict[str, Any]) -> Axes:
    return ()


def _same(operands: tuple[Axes, ...], attrs: dict[str, Any]) -> Axes:
    return operands[0]


def _drop(operands: tuple[Axes, ...], attrs: dict[str, Any]) -> Axes:
    axes, axis = operands[0], attrs["axis"]
    if axis not in axes:
        raise IRError(f"no axis {axis!r} to sum over in {_axes_text(axes)}")
    if axes.count(axis) == 2:  # [C, C]: sums over the columns
        return axes[:1]
    return tuple(a for a in axes if a != axis)


def _spread(operands: tuple[Axes, ...], attrs: dict[str, Any]) -> Axes:
    axes = tuple(attrs["axes"])
    if _broadcast((*operands, axes), {}) != axes:
        raise IRError(f"axes {_axes_text(operands[0])} do not broadcast against {_axes_text(axes)}")
    return axes


def _matmul(operands: tuple[Axes, ...], attrs: dict[str, Any]) -> Axes:
    x, y = operands
    if len(x) != 2 or len(y) != 2:
        raise IRError("a product of tiles needs two axes on both sides")
    x = x[::-1] if attrs["tx"] else x
    y = y[::-1] if attrs["ty"] else y
    if x[1] != y[0]:
        raise IRError(f"inner axes differ: {x[1]} and {y[0]}")
    return (x[0], y[1])


def _square(operands: tuple[Axes, ...], attrs: dict[str, Any]) -> Axes:
    if operands[0] != ("C", "C"):
        raise IRError(f"expected [C, C], got {_axes_text(operands[0])}")
    return operands[-1]


def _running(operands: tuple[Axes, ...], attrs: dict[str, Any]) -> Axes:
    axes = operands[0]
    if not axes or axes[0] != "C":
        raise IRError(f"a running sum needs a leading chunk axis, got {_axes_text(axes)}")
    if attrs["over"] not in ("to", "before", "after", "from", "all"):
        raise IRError(f"unknown run {attrs['over']!r}")
    return axes[1:] if attrs["over"] == "all" else axes


def _gram(operands: tuple[Axes, ...], attrs: dict[str, Any]) -> Axes:
    x, y, g = operands
    if x != ("C", "K") or y != ("C", "K"):
        raise IRError(f"expected [C, K] operands, got {_axes_text(x)} and {_axes_text(y)}")
    if g not in (("C", "K"), ("C",), ()):
        raise IRError(f"expected a log-decay [C, K] or [C], got {_axes_text(g)}")
    if attrs["left"] == "before" and not attrs["strict"]:
        raise IRError("a left operand decayed only up to the token before has no diagonal")
    return ("C", "C")


def _gram_vjp(operands: tuple[Axes, ...], attrs: dict[str, Any]) -> Axes:
    if operands[0] != ("C", "C") or operands[1] != ("C", "K"):
        raise IRError(f"expected [C, C] and [C, K], got {_axes_text(operands[0])} and {_axes_text(operands[1])}")
    return ("C", "K")


def _gram_share(operands: tuple[Axes, ...], attrs: dict[str, Any]) -> Axes:
    if operands[1] != ("C", "K"):
        raise IRError(f"expected [C, K], got {_axes_text(operands[1])}")
    return _gram_vjp((operands[0], *operands[2:]), attrs)


def _outer(operands: tuple[Axes, ...], attrs: dict[str, Any]) -> Axes:
    if operands != (("K",), ("V",)):
        raise IRError(f"outer takes [K] and [V], got {_axes_text(operands[0])} and {_axes_text(operands[1])}")
    return ("K", "V")


def _pair(operands: tuple[Axes, ...], attrs: dict[str, Any]) -> Axes:
    if operands[0] != ("C",):
        raise IRError(f"expected one log-decay a token, [C], got {_axes_text(operands[0])}")
    return ("C", "C")


# ---------------------------------------------------------------------------------------------------------------------
# The vocabulary


def _quiet(f: Callable[..., float]) -> Callable[..., float]:
    """``f`` on plain floats, NaN where it is undefined."""

    def call(*args: float, **attrs: Any) -> float:
        if any(math.isnan(x) for x in args):
            return math.nan
        try:
            return float(f(*args))
        except (ValueError, ZeroDivisionError, OverflowError):
            return math.nan

    return call


def _product_at_zero(x: float, y: float, **attrs: Any) -> float:
    return x * y


def _elementwise(name: str, arity: int, show: str, torch: str, triton: str, at_zero: Callable[..., float]) -> None:
    register(Op(name, arity, _broadcast, show, torch, triton, _quiet(at_zero)))


# Leaves: `input` a stream of the variant or a saved value, `param` a number known at the call, `const` a literal.
register(Op("input", 0, _given, "{name}", at_zero=lambda **a: 0.0))
register(Op("param", 0, _none, "{name}", at_zero=lambda **a: 1.0))
register(Op("const", 0, _none, "{value!r}", at_zero=lambda **a: float(a["value"])))

_elementwise("add", 2, "({0} + {1})", "({0} + {1})", "({0} + {1})", lambda x, y: x + y)
_elementwise("mul", 2, "({0} * {1})", "({0} * {1})", "({0} * {1})", lambda x, y: x * y)
_elementwise("neg", 1, "-{0}", "(-{0})", "(-{0})", lambda x: -x)
_elementwise("div", 2, "({0} / {1})", "({0} / {1})", "({0} / {1})", lambda x, y: x / y)
# 0 where the divisor is 0: x / |x| of a zero row, and the derivative of the square root at 0.
_elementwise(
    "safe_div",
    2,
    "({0} /0 {1})",
    "torch.where({1} == 0, 0, {0} / torch.where({1} == 0, 1, {1}))",
    "tl.where({1} == 0, 0.0, {0} / tl.where({1} == 0, 1.0, {1}))",
    lambda x, y: 0.0 if y == 0 else x / y,
)
_elementwise("exp", 1, "exp({0})", "torch.exp({0})", "tl.exp({0})", math.exp)
_elementwise("log", 1, "log({0})", "torch.log({0})", "tl.log({0})", math.log)
# Of a decay. One below 1e-30 counts as 1e-30, with derivative 0: so that alpha = 0 has a finite logarithm.
_elementwise(
    "log_decay",
    1,
    "log({0})",
    "torch.log(torch.clamp_min({0}, 1e-30))",
    "tl.log(tl.where({0} < 1e-30, 1e-30, {0}))",
    lambda x: math.log(max(x, 1e-30)),
)
_elementwise("above", 1, "above({0})", "torch.where({0} < 1e-30, 0, {0})", "tl.where({0} < 1e-30, 0.0, {0})", float)
_elementwise(
    "log_sigmoid",
    1,
    "log_sigmoid({0})",
    "torch.nn.functional.logsigmoid({0})",
    "(tl.minimum({0}, 0.0) - tl.log(1.0 + tl.exp(-tl.abs({0}))))",
    lambda x: min(x, 0.0) - math.log1p(math.exp(-abs(x))),
)
_elementwise("sqrt", 1, "sqrt({0})", "torch.sqrt({0})", "tl.sqrt({0})", math.sqrt)
_elementwise(
    "sigmoid", 1, "sigmoid({0})", "torch.sigmoid({0})", "tl.sigmoid({0})", lambda x: 1.0 / (1.0 + math.exp(-x))
)
# A value as a bfloat16 product takes it, rounded; elsewhere the same value (what TF32 cuts off is left out).
_elementwise("taken", 1, "taken({0})", "{0}", "{0}.to(DOT).to(tl.float32)", lambda x: x)
# 1 where `minimum` takes its first operand. Ties, and 8 eps of the computing dtype around them, go to the first, so a
# bound that is met exactly (GDN2's clip at |k| = 1) leaves the gradient with the value that it bounds.
_elementwise(
    "is_first",
    2,
    "[{0} <~ {1}]",
    "({1} >= {0} - 8 * torch.finfo({0}.dtype).eps).to({0}.dtype)",
    "tl.where({1} >= {0} - 9.5367431640625e-07, 1.0, 0.0)",
    lambda x, y: 1.0 if y >= x else 0.0,
)
_elementwise(
    "minimum",
    2,
    "min({0}, {1})",
    "torch.where({1} >= {0} - 8 * torch.finfo({0}.dtype).eps, {0}, {1})",
    "tl.where({1} >= {0} - 9.5367431640625e-07, {0}, {1})",
    min,
)

# Shape.
register(Op("sum", 1, _drop, "sum_{axis}({0})", at_zero=lambda x, **a: x))
register(Op("spread", 1, _spread, "spread({0})", at_zero=lambda x, **a: x))
# Zero outside the sequence and the tile's real columns; the identity in the mathematics.
register(Op("valid", 1, _same, "valid({0})", at_zero=lambda x, **a: 0.0))

# One token's write into the state: x y^T.
register(Op("outer", 2, _outer, "outer({0}, {1})", at_zero=_product_at_zero))

# Tiles. `mask` keeps the lower triangle, without the diagonal if strict.
register(Op("matmul", 2, _matmul, "({0}{tx:T} @ {1}{ty:T})", at_zero=_product_at_zero, cost="product"))
register(Op("mask", 1, _square, "mask({0}, strict={strict})", at_zero=lambda x, **a: x))
# Sums over the tokens i of the chunk, at token r: to i <= r, before i < r, after i > r, from i >= r, all.
register(Op("run", 1, _running, "sum[{over}]({0})", at_zero=lambda x, **a: x))
# Its derivatives gram_dx(d, y; g) and gram_dy(d, x; g) read d below the diagonal only.
# gram[i, j] = sum_K x_i y_j exp(sum of g over j+1..i), j <= i (j < i if strict). left = before: over j+1..i-1.
register(
    Op(
        "gram",
        3,
        _gram,
        "gram({0}, {1}; {2}, {left}, strict={strict})",
        at_zero=lambda x, y, g, **a: x * y,
        cost="product",
    )
)
register(
    Op(
        "gram_dx",
        3,
        _gram_vjp,
        "gram_dx({0}, {1}; {2}, {left}, strict={strict})",
        at_zero=lambda x, y, g, **a: x * y,
        cost="product",
    )
)
register(
    Op(
        "gram_dy",
        3,
        _gram_vjp,
        "gram_dy({0}, {1}; {2}, {left}, strict={strict})",
        at_zero=lambda x, y, g, **a: x * y,
        cost="product",
    )
)
# What a row of a decayed Gram product adds to the gradient of the log-decays, x gram_dx(d, y; g), and what a column
# takes from it, y gram_dy(d, x; g): from the same rounded factors, so that a pair that both sums hold cancels.
for _share in ("gram_gain", "gram_loss"):
    register(
        Op(
            _share,
            4,
            _gram_share,
            _share + "({0}, {1}, {2}; {3}, {left}, strict={strict})",
            at_zero=lambda d, x, y, g, **a: d * x * y,
            cost="product",
        )
    )
# A C x C tile with its columns scaled by one number a token.
register(
    Op(
        "columns",
        2,
        lambda operands, attrs: _square(operands[:1], attrs),
        "({0} * {1}^T)",
        at_zero=lambda x, y, **a: x * y,
    )
)
# The diagonal of a C x C tile.
register(
    Op("diagonal", 1, lambda operands, attrs: _square(operands, attrs)[:1], "diagonal({0})", at_zero=lambda x, **a: x)
)
# The same decay for one number a head: exp(sum of g over j+1..i), masked.
register(Op("pair", 1, _pair, "pair({0}, {left}, strict={strict})", at_zero=lambda x, **a: 1.0))
# (I + N)^-1 X and its transpose, N strictly lower triangular.
register(Op("solve", 2, _square, "solve({0}, {1})", at_zero=lambda n, x, **a: x, cost="solve"))
register(Op("solve_t", 2, _square, "solve_t({0}, {1})", at_zero=lambda n, x, **a: x, cost="solve"))
register(Op("inverse", 1, _square, "inverse({0})", at_zero=lambda n, **a: 1.0, cost="solve"))


# ---------------------------------------------------------------------------------------------------------------------
# Constructors: the words a binding is written in


def leaf(name: str, axes: Axes, **attrs: Any) -> Node:
    return node("input", name=name, axes=axes, **attrs)


def key(name: str) -> Node:
    """A key-like input ``[B, T, H, K]`` in the model's dtype (q, k, a, b, d, j, p)."""
    return leaf(name, ("K",), heads="H", role="key")


def value(name: str) -> Node:
    """The value input ``[B, T, HV, V]`` in the model's dtype."""
    return leaf(name, ("V",), heads="HV", role="value")


def gate(name: str, axis: str | None = None) -> Node:
    """A gate ``[B, T, HV]``, or with one more axis ``K`` or ``V``; the model's dtype or float32."""
    return leaf(name, (axis,) if axis else (), heads="HV", role="gate")


def param(name: str) -> Node:
    return node("param", name=name)


def const(number: float) -> Node:
    if not math.isfinite(number):
        raise IRError(f"a constant must be finite, got {number}")
    return node("const", value=float(number))


def exp(x: Node | float) -> Node:
    return node("exp", _lift(x))


def log(x: Node | float) -> Node:
    return node("log", _lift(x))


def sqrt(x: Node | float) -> Node:
    """Square root; its derivative at 0 is taken as 0."""
    return node("sqrt", _lift(x))


def sigmoid(x: Node | float) -> Node:
    return node("sigmoid", _lift(x))


def minimum(x: Node | float, bound: Node | float) -> Node:
    """``x``, or ``bound`` where that is smaller by more than 8 eps; the gradient follows the one taken."""
    return node("minimum", _lift(x), _lift(bound))


def safe_div(x: Node | float, y: Node | float) -> Node:
    """``x / y``, and 0 where y is 0."""
    return node("safe_div", _lift(x), _lift(y))


def dot(x: Node, y: Node | float) -> Node:
    """Inner product over the channels of two token-level streams."""
    return node("sum", x * y, axis="K")


def norm(x: Node) -> Node:
    """Euclidean length over the key channels, with derivative 0 at 0."""
    return sqrt(dot(x, x))


def matmul(x: Node, y: Node, *, tx: bool = False, ty: bool = False) -> Node:
    return node("matmul", x, y, tx=_Flag(tx), ty=_Flag(ty))


class _Flag(int):
    """A truth value that prints as a transpose mark."""

    def __format__(self, spec: str) -> str:
        return "^T" if self else ""


# ---------------------------------------------------------------------------------------------------------------------
# Walks


def topological(roots: Iterable[Node], stop: frozenset[Node] = frozenset()) -> list[Node]:
    """Every node below ``roots``, operands first; nodes in ``stop`` are listed but not entered."""
    order: list[Node] = []
    seen: set[Node] = set()
    stack: list[tuple[Node, bool]] = [(r, False) for r in reversed(list(roots))]
    while stack:
        n, done = stack.pop()
        if done:
            order.append(n)
        elif n not in seen:
            seen.add(n)
            stack.append((n, True))
            if n not in stop:
                stack.extend((a, False) for a in reversed(n.args))
    return order


def descendants(roots: Iterable[Node], of: Node) -> set[Node]:
    """The nodes below ``roots`` that depend on ``of``, itself included."""
    reached: set[Node] = set()
    for n in topological(roots):
        if n is of or any(a in reached for a in n.args):
            reached.add(n)
    return reached


def substitute(roots: Iterable[Node], table: Mapping[Node, Node]) -> dict[Node, Node]:
    """Each node below ``roots`` with the nodes of ``table`` replaced, as a map from old to new."""
    done: dict[Node, Node] = {}
    for n in topological(roots):
        if n in table:
            done[n] = table[n]
        elif any(done[a] is not a for a in n.args):
            done[n] = node(n.op, *(done[a] for a in n.args), **dict(n.attrs))
        else:
            done[n] = n
    return done


def constants(root: Node) -> dict[Node, float]:
    """The values of what is made of numbers alone; NaN if undefined."""
    found: dict[Node, float] = {}
    for n in topological([root]):
        if n.op == "const" or (n.args and all(a in found for a in n.args) and OPS[n.op].elementwise):
            try:
                found[n] = OPS[n.op].at_zero(*(found[a] for a in n.args), **dict(n.attrs))
            except (ArithmeticError, ValueError):
                found[n] = math.nan
    return found


# ---------------------------------------------------------------------------------------------------------------------
# Programs


@dataclass(frozen=True)
class Program:
    """Named outputs over leaves, and names for the values inside that are worth one.

    ``carried`` lists the values that go from chunk to chunk: (leaf, next, direction), direction +1 or -1.
    """

    name: str
    outputs: tuple[tuple[str, Node], ...]
    carried: tuple[tuple[Node, Node, int], ...] = ()
    names: Mapping[Node, str] = field(default_factory=dict)

    def roots(self) -> list[Node]:
        return [n for _, n in self.outputs] + [n for _, n, _ in self.carried]

    def nodes(self) -> list[Node]:
        return topological(self.roots())

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def lines(self) -> Iterator[str]:
        """The program in static single assignment form: one line a named or shared value."""
        order = self.nodes()
        uses: dict[Node, int] = {}
        for n in order:
            for a in n.args:
                uses[a] = uses.get(a, 0) + 1
        names = dict(self.names)
        taken = set(names.values())
        for n in order:
            tile = OPS[n.op].cost != "cheap" or uses.get(n, 0) > 1
            if n not in names and n.args and tile and n.op != "neg":
                number = 1
                while f"t{number}" in taken:
                    number += 1
                names[n] = f"t{number}"
                taken.add(names[n])
        yield f"program {self.name}"
        for n in order:
            if n.op == "input":
                yield f"  {show(n):<8} input {_axes_text(n.axes)}"
        for n in order:
            if n in names and n.args:
                yield f"  {names[n]:<8} {_axes_text(n.axes):<7} = {show(n, names)}"
        for state, new, step in self.carried:
            arrow = "next" if step > 0 else "previous"
            yield f"  {show(state)} of the {arrow} chunk = {names.get(new, show(new, names))}"
        for label, n in self.outputs:
            yield f"  return {label} = {names.get(n, show(n, names))}"


def verify(program: Program) -> None:
    """Raise IRError where a program breaks a rule that every pass must keep.

    Nodes are well typed by construction; what remains: names are unique and carried values keep their axes. What must
    hold of exponents holds from `stabilize` on, which has a check of its own.
    """
    labels = list(program.names.values())
    if len(set(labels)) != len(labels):
        raise IRError(f"{program.name}: two values share a name")
    for state, new, _ in program.carried:
        if state.axes != new.axes and new.axes:
            raise IRError(f"{program.name}: carried value {show(state)} has axes {state.axes}, its next {new.axes}")


def unbounded_exponents(program: Program) -> list[Node]:
    """Exponentials of a negated running sum: what ``stabilize`` must have removed."""
    return [n for n in program.nodes() if n.op == "exp" and n.args[0].op == "neg" and n.args[0].args[0].op == "run"]
