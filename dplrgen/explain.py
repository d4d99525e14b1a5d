"""What became of a variant: the program after every pass, the rules that fired, and what the kernels cost.

Products are counted twice. A *program's* count holds every tile product once, whatever it takes to run it: that is the
arithmetic of the chunk form. The count *as lowered* goes launch by launch and holds what the machine does: a decayed
Gram product is a product a level of its tree, a running sum is a product with a 0/1 matrix, an inverse doubles its
blocks level by level, and what an earlier launch has computed already counts again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from dplrgen import codegen, pipeline, schedule
from dplrgen.ir import Axes, Node, Program, substitute
from dplrgen.passes import Fired, count
from dplrgen.pipeline import Stage
from dplrgen.schedule import TREE, Kernel, Plan
from dplrgen.variants import Variant

__all__ = ["Launch", "Sizes", "Work", "explain", "launches", "sides", "traffic", "usual", "work"]

_ABOUT: Mapping[str, str] = {
    "chunkify": "the chunk form of the recurrence with the streams put in; not yet fit for numbers",
    "differentiate": "the folded forward and its reverse walk, one derivative rule an operation",
    "simplify": "identities",
    "stabilize": "no exponent of unbounded size is left, and no division by a decay",
    "fold": "what the binding makes equal is computed once",
    "linearize": "sums of like operations become one operation on the sum",
    "hoist": "work leaves the part that is sequential over chunks",
    "lower": "what the machine does",
    "pad": "zeros where the tail of a sequence would be read",
}

_BLOCK = 16
_KINDS = ("tile", "tree", "inverse", "sums")


@dataclass(frozen=True)
class Sizes:
    """The sizes that costs are stated at: tokens a chunk, channels, bytes an element of a stream."""

    C: int
    K: int
    V: int
    element: int = 2

    @property
    def levels(self) -> int:
        return self.C.bit_length() - 1

    @property
    def fine(self) -> bool:
        return self.K <= schedule.FINE_K and self.element == 2

    def elements(self, axes: Axes) -> int:
        return math.prod({"C": self.C, "K": self.K, "V": self.V}[a] for a in axes)


def usual(K: int = 128, V: int = 128, element: int = 2) -> Sizes:
    """K = V = 128 in bfloat16, with the chunk length that the schedule takes there."""
    return Sizes(_setting(K, element)[0], K, V, element)


def _setting(K: int, element: int) -> tuple[int, schedule.Table]:
    """Chunk length and kernel options: the first line of the schedule's table that fits."""
    products = "bfloat16" if element == 2 else "ieee"
    return next((chunk, t) for name, largest, chunk, t in schedule.CONFIGS if name == products and largest >= K)


def _columns(kernel: Kernel, sizes: Sizes) -> int:
    """Value columns a block."""
    return min(sizes.V, schedule.options_of(kernel, _setting(sizes.K, sizes.element)[1])[1])


# ---------------------------------------------------------------------------------------------------------------------
# What one operation takes


@dataclass(frozen=True)
class Work:
    """Products that an operation, or a walk over the levels of a tree, takes in a chunk of one head.

    ``kind`` is tile, tree, inverse or sums (products with 0/1 matrices). ``of`` is the value, for a walk its log-decay.
    """

    of: Node
    kind: str
    products: int
    flops: int
    exponentials: int = 0


def _parts(n: Node) -> int:
    """bfloat16 parts that hold a value exactly: one for a bfloat16 gate as it was loaded, three for a float32 value."""
    return 1 if n.op == "input" else 3


def _matmul(n: Node, sizes: Sizes) -> Work:
    inner = n.args[0].axes[0 if n.attr("tx") else 1]
    products = 1 + sum(sizes.fine if part == "FINE" else part == "True" for part in codegen.parts_of(n))
    products = products if sizes.element == 2 else 1  # IEEE float32 needs no parts
    return Work(n, "tile", products, products * 2 * sizes.elements((*n.axes, inner)))


def _tree(n: Node, sizes: Sizes) -> Work:
    return Work(n, "tree", sizes.levels, sum(2 * sizes.C * side * sizes.K for side in _sides(sizes)))


def _sides(sizes: Sizes) -> list[int]:
    """The side of the tiles that a level multiplies: the lowest levels join tokens of one block of 16."""
    return [_BLOCK if 2 << level <= _BLOCK else sizes.C for level in range(sizes.levels)]


def _inverse(n: Node, sizes: Sizes) -> Work:
    # The first level is elementwise, a later one multiplies twice; a step of Newton's method takes four products.
    refine = 4 if sizes.fine else 0
    flops = sum(4 * sizes.C * side**2 for side in _sides(sizes)[1:]) + refine * 2 * sizes.C**3
    return Work(n, "inverse", 2 * (sizes.levels - 1) + refine, flops)


def _run(n: Node, sizes: Sizes) -> Work:
    # Over all tokens, or of one number a token, it is a reduction; of a gradient, a scan. Neither is a product.
    product = n.attr("over") != "all" and len(n.args[0].axes) == 2 and codegen.is_exponent(n)
    products = _parts(n.args[0]) if product else 0
    return Work(n, "sums", products, products * 2 * sizes.C * sizes.elements(n.args[0].axes))


def _exp(n: Node, sizes: Sizes) -> Work:
    return Work(n, "exp", 0, 0, exponentials=1)


#: By operation. What is not here is elementwise or a reduction.
_WORK: Mapping[str, Callable[[Node, Sizes], Work]] = {
    "matmul": _matmul,
    "gram": _tree,
    "gram_dx": _tree,
    "gram_dy": _tree,
    "inverse": _inverse,
    "run": _run,
    "pair": _exp,
    "exp": _exp,
}


def _walks(nodes: Sequence[Node], sizes: Sizes) -> Iterator[Work]:
    """A walk over the levels serves all decayed Gram products of one log-decay that are ready together.

    At each level it sums the log-decay over the tokens between a row and the edge, twice where a left operand is
    decayed up to the token before.
    """
    depth: dict[Node, int] = {}
    walks: dict[tuple[Node, int], bool] = {}
    for n in nodes:
        below = max((depth.get(a, 0) for a in n.args), default=0)
        depth[n] = below + (n.op in TREE)
        if n.op in TREE:
            walk = (n.args[-1], below)
            walks[walk] = walks.get(walk, False) or n.attr("left") == "before"
    for (log_decay, _), before in walks.items():
        times = (2 if before else 1) * _parts(log_decay)
        flops = times * sum(2 * sizes.C * side * sizes.K for side in _sides(sizes))
        sums = sizes.levels * (2 if before else 1)
        yield Work(log_decay, "sums", sizes.levels * times, flops, exponentials=sums)


def work(kernel: Kernel, sizes: Sizes) -> list[Work]:
    """What a launch computes in a chunk of one head, elementwise work aside."""
    own = [_WORK[n.op](n, sizes) for n in kernel.nodes if n.op in _WORK]
    return [*own, *(walk for phase in kernel.phases for walk in _walks(phase.nodes, sizes))]


# ---------------------------------------------------------------------------------------------------------------------
# Launches


@dataclass(frozen=True)
class Launch:
    """A launch's work and its memory traffic, a chunk and head.

    ``again`` counts the products that were computed before, in this launch or an earlier one, ``reread`` the bytes
    that further blocks of value columns, or further loops over blocks, read once more (out of the cache), ``kept`` the
    part of ``written`` that waits for the backward.
    """

    name: str
    kind: str
    products: Mapping[str, int]
    again: int
    exponentials: int
    flops: int
    read: int
    reread: int
    written: int
    kept: int

    @property
    def total(self) -> int:
        return sum(self.products.values())


@dataclass(frozen=True)
class Side:
    """A variant's forward or backward: the stages it went through and the launches it became."""

    name: str
    stages: tuple[Stage, ...]
    plan: Plan
    launches: tuple[Launch, ...] = field(default=())


def sides(variant: Variant, sizes: Sizes) -> tuple[Side, Side]:
    """Forward and backward. What the forward computed and did not save counts as done again in the backward."""
    made = codegen.plans(variant)
    ahead, seen = launches(made.forward, sizes)
    # Saved values come back as leaves; with the forward's values in their place, equal values are the same node.
    restored = dict(zip(made.backward.saved, made.forward.saved, strict=True))
    back, _ = launches(made.backward, sizes, seen, restored)
    return (
        Side("forward", tuple(pipeline.forward(variant)), made.forward, ahead),
        Side("backward", tuple(pipeline.backward(variant)), made.backward, back),
    )


Seen = frozenset[Hashable]


def launches(
    plan: Plan, sizes: Sizes, seen: Seen = frozenset(), restored: Mapping[Node, Node] | None = None
) -> tuple[tuple[Launch, ...], Seen]:
    """The launches of a plan, and what has been computed after them. ``seen`` is what was computed before."""
    out: list[Launch] = []
    for kernel in plan.kernels:
        items = work(kernel, sizes)
        plain = substitute([i.of for i in items], restored or {})
        keys = [(i.kind, plain[i.of]) for i in items]
        before = [key in seen or key in keys[:i] for i, key in enumerate(keys)]
        again = sum(item.products for item, done in zip(items, before, strict=True) if done)
        out.append(_launch(plan, kernel, items, again, sizes))
        seen = seen.union(keys)
    return tuple(out), seen


def _launch(plan: Plan, kernel: Kernel, items: Iterable[Work], again: int, sizes: Sizes) -> Launch:
    items = tuple(items)
    state = None if kernel.state is None else kernel.state[0]
    loads = {n: _bytes(plan, n, sizes) for n in kernel.loads if n is not state}
    stores = {n: _bytes(plan, n, sizes) for n in kernel.stores}
    states = 0 if state is None or not kernel.keep_state else _bytes(plan, state, sizes)
    return Launch(
        name=kernel.name,
        kind=kernel.kind,
        products={kind: sum(i.products for i in items if i.kind == kind) for kind in _KINDS},
        again=again,
        exponentials=sum(i.exponentials for i in items),
        flops=sum(i.flops for i in items),
        read=sum(loads.values()),
        reread=sum(size * (_reads(kernel, n, sizes) - 1) for n, size in loads.items()),
        written=sum(stores.values()) + states,
        kept=sum(size for n, size in stores.items() if n in plan.saved),
    )


def _bytes(plan: Plan, n: Node, sizes: Sizes) -> int:
    result = any(m is n for _, m in plan.program.outputs)
    kept = "dot" if n.op == "input" or result else codegen.storage(n, plan)
    wide = kept == "float32" or (kept == "fine" and sizes.fine)
    return sizes.elements(n.axes) * (4 if wide else sizes.element)


def _reads(kernel: Kernel, n: Node, sizes: Sizes) -> int:
    """How often a launch reads a value: a scan once a block of value columns, a parallel kernel once a loop."""
    if kernel.kind == "scan":
        return 1 if "V" in n.axes else -(-sizes.V // _columns(kernel, sizes))
    return max(1, sum(p.loop in n.axes and any(n in m.args for m in p.nodes) for p in kernel.phases))


def traffic(program: Program, sizes: Sizes) -> int:
    """Bytes moved if every equation were a launch of its own: operands read and result written, as wide as a stream."""
    made = [n for n in program.nodes() if n.args and n.op != "spread"]
    return sizes.element * sum(sizes.elements(n.axes) + sum(sizes.elements(a.axes) for a in n.args) for n in made)


def _least(program: Program, sizes: Sizes) -> int:
    """Bytes that must move: every stream read once, every result written once."""
    streams = [n for n in program.nodes() if n.op == "input" and n.axes[:1] == ("C",)]
    return sizes.element * sum(sizes.elements(n.axes) for n in (*streams, *(n for _, n in program.outputs)))


# ---------------------------------------------------------------------------------------------------------------------
# Text


def explain(variant: Variant, backward: bool = False) -> str:
    """The whole account as text, of the forward or of the backward."""
    sizes = usual()
    side = sides(variant, sizes)[backward]
    lines = list(_header(variant, side, sizes))
    previous: Stage | None = None
    for stage in side.stages:
        lines += ["", *_stage(stage, previous, sizes)]
        previous = stage
    lines += ["", *_summary(side.stages, sizes), "", *_lowered(side, sizes)]
    return "\n".join(lines) + "\n"


def _header(variant: Variant, side: Side, sizes: Sizes) -> Iterator[str]:
    yield f"{variant.name}, {side.name}: {variant.about}" if variant.about else f"{variant.name}, {side.name}"
    yield ""
    yield "    S_t = S_(t-1) Diag(alpha_t) (I - b_t a_t^T) + v_t k_t^T        o_t = scale * S_t q_t"
    yield ""
    yield from (f"    {line}" for line in variant.binding())
    yield ""
    yield from (f"    {name:<6} [{', '.join(('B', 'T', heads, *axes))}]" for name, heads, axes in variant.signature())
    yield ""
    yield f"Costs are those of one chunk of one head, {_at(sizes)}."


def _at(sizes: Sizes) -> str:
    return f"C = {sizes.C}, K = {sizes.K}, V = {sizes.V}, bfloat16"


def _costs(program: Program, sizes: Sizes) -> dict[str, int]:
    return {**count(program), "KiB": traffic(program, sizes) // 1024}


def _stage(stage: Stage, previous: Stage | None, sizes: Sizes) -> Iterator[str]:
    """A pass: what fired, what it changed in the counts, and the program after it."""
    about = _ABOUT.get(stage.name)
    yield f"== {stage.name}: {about}" if about else f"== {stage.name}"
    yield from _rules(stage.fired)
    after = _costs(stage.program, sizes)
    before = after if previous is None else _costs(previous.program, sizes)
    moves = (f"{what} {before[what]} -> {x}" if before[what] != x else f"{what} {x}" for what, x in after.items())
    yield f"counts {', '.join(moves)}"
    same = previous is not None and list(previous.program.lines()) == list(stage.program.lines())
    yield from ("the program is as before",) if same else stage.program.lines()


def _rules(fired: Sequence[Fired]) -> Iterator[str]:
    """Each rule that fired, how often, and where."""
    for name in dict.fromkeys(f.rule for f in fired):
        mine = [f for f in fired if f.rule == name]
        yield f"fired {name} x{len(mine)} at"
        for before, after in dict.fromkeys((_short(f.before), _short(f.after)) for f in mine):
            yield f"      {before}"
            yield f"   -> {after}"


def _short(text: str, width: int = 110) -> str:
    return text if len(text) <= width else f"{text[: width - 4]} ..."


def _summary(stages: Sequence[Stage], sizes: Sizes) -> Iterator[str]:
    yield "== the counts, pass by pass (KiB: what would move if every equation were a launch of its own)"
    rows = [["pass", *_costs(stages[0].program, sizes)]]
    rows += [[stage.name, *(str(x) for x in _costs(stage.program, sizes).values())] for stage in stages]
    yield from _table(rows)


def _lowered(side: Side, sizes: Sizes) -> Iterator[str]:
    """The launches, a row each, and their sum."""
    yield f"== as lowered, launch by launch, {_at(sizes)}"
    kinds = ("tile", "tree", "inverse", "0/1 sums")
    rows = [["launch", "", *kinds, "products", "again", "exponentials", "MFLOP", "read KiB", "reread", "written"]]
    rows += [[launch.name, "scan" if launch.kind == "scan" else "", *_numbers([launch])] for launch in side.launches]
    rows += [["all", "", *_numbers(side.launches)]]
    yield from _table(rows)
    program, total = side.plan.program, sum(launch.total for launch in side.launches)
    yield ""
    yield f"The program's {count(side.stages[-1].program)['products']} tile products are {total} as lowered:"
    yield "  tile      products of tiles as in the program; what the forward saved is read, not formed"
    yield "  tree      a decayed Gram product is one a level; inverse: two a level, but none at the first"
    yield "  0/1 sums  sums over tokens; a bfloat16 gate is one part, a float32 value three"
    yield "  again     among them, what was computed before, in this launch or an earlier one"
    yield "Read and written count a value once a launch; reread is what further blocks read again, out of the cache."
    kept = sum(launch.kept for launch in side.launches)
    if kept:
        names = ", ".join(side.plan.names[n] for n in side.plan.saved)
        yield f"Saved for the backward: {names}, {_kib(kept)} of the KiB written; nothing where no gradient is needed."
    yield f"Inputs read once and results written once would be {_kib(_least(program, sizes))} KiB."


def _numbers(rows: Sequence[Launch]) -> Iterator[str]:
    yield from (str(sum(row.products[kind] for row in rows)) for kind in _KINDS)
    yield str(sum(row.total for row in rows))
    yield str(sum(row.again for row in rows))
    yield str(sum(row.exponentials for row in rows))
    yield f"{sum(row.flops for row in rows) / 1e6:.1f}"
    yield from (_kib(sum(size)) for size in zip(*((r.read, r.reread, r.written) for r in rows), strict=True))


def _kib(size: int) -> str:
    return f"{size / 1024:.1f}"


def _table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Columns two spaces apart, the first to the left and the others to the right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        cells = [text.rjust(width) for text, width in zip(row, widths, strict=True)]
        cells[0] = row[0].ljust(widths[0])
        yield "  ".join(cells).rstrip()
