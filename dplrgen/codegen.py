"""The back half: a variant's plans printed as one standalone Python file.

Templates are kernel skeletons; equations come from the plan, one statement a bound value, by a table keyed by op. The
text is a function of the variant, this package's version and the templates alone.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import jinja2

from dplrgen import pipeline, schedule
from dplrgen.ir import OPS, Axes, Node, show, topological, unwrapped
from dplrgen.passes import literal, terms
from dplrgen.schedule import TREE, Kernel, Phase, Plan, contracts, is_leaf
from dplrgen.variants import Variant

__all__ = [
    "VERSION",
    "Plans",
    "digest",
    "emit",
    "is_exponent",
    "parts_of",
    "plans",
    "render",
    "storage",
    "write_if_changed",
]

TEMPLATES = Path(__file__).parent / "templates"
VERSION = "0.1.0"


@dataclass(frozen=True)
class Plans:
    """A variant's forward and backward, cut into kernels."""

    variant: Variant
    forward: Plan
    backward: Plan


@lru_cache(maxsize=4)
def plans(variant: Variant) -> Plans:
    """Compile a variant down to its kernels."""
    ahead = pipeline.forward(variant)[-1].program
    back = pipeline.backward(variant)[-1].program
    saved = schedule.saved_values(ahead, back)
    return Plans(variant, schedule.plan(ahead, saved), schedule.plan(back, saved, load_saved=True))


# ---------------------------------------------------------------------------------------------------------------------
# Statements


@dataclass(frozen=True)
class Line:
    """One statement: what it binds, the expression, the IR equation, and what kind of statement the template prints."""

    kind: str  # let, sum (accumulates in a loop), load, store, tree
    name: str
    code: str = ""
    equation: str = ""
    info: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Block:
    """A phase of a kernel ready to print: lines before its loop over K or V (if it has one), in it, and after it."""

    loop: str
    before: tuple[Line, ...]
    body: tuple[Line, ...]
    after: tuple[Line, ...]


def _shape(axes: Axes, sizes: Mapping[str, str]) -> str:
    return "[" + ", ".join(sizes[a] for a in axes) + "]"


def _aligned(text: str, axes: Axes, out: Axes) -> str:
    """Triton broadcasting of a one-axis operand, by name."""
    if len(axes) == 1 and len(out) == 2:
        return f"{text}[:, None]" if axes[0] == out[0] else f"{text}[None, :]"
    return text


_BLOCK = {"C": "C", "K": "BK", "V": "BV"}
_INSIDE = {"C": "in_c", "K": "in_k", "V": "in_v"}
_KEEP = {"to": "col <= row", "before": "col < row", "after": "col > row", "from": "col >= row"}


def _inside(axes: Axes) -> str:
    if len(axes) == 1:
        return _INSIDE[axes[0]]
    return f"{_INSIDE[axes[0]]}[:, None] & {_INSIDE[axes[1]]}[None, :]"


def _triton_matmul(n: Node, args: list[str]) -> str:
    x = f"tl.trans({args[0]})" if n.attr("tx") else args[0]
    y = f"tl.trans({args[1]})" if n.attr("ty") else args[1]
    parts = parts_of(n)
    if any(p != "False" for p in parts):
        return f"_dot_fine({x}, {y}, DOT, PRECISION, {', '.join(parts)})"
    return f"_dot({x}, {y}, DOT, PRECISION)"


def parts_of(n: Node) -> list[str]:
    """Whether a product takes each operand in two parts: "True", "False", or "FINE" where the key size decides.

    Always: the inverse, what it meets and amplifies that is summed, and values added to a state, where rounding stays.
    """
    grains = [_grain(a) for a in n.args]
    if "inverse" in grains:
        return ["True" if grain else _met(a) for grain, a in zip(grains, n.args, strict=True)]
    if n.axes == ("K", "V"):
        return [str(grain != "") for grain in grains]
    return ["FINE" if grain else "False" for grain in grains]


def _met(n: Node) -> str:
    """The same for a tile that the inverse meets: not for a given one, which a product's dtype holds as it is."""
    if n.op == "input" or (n.op == "valid" and n.args[0].op == "input"):
        return "False"
    return "True" if any(m.op == "matmul" for m in topological([n])) else "FINE"


def _grain(n: Node) -> str:
    """Whether rounding a tile once, to a product's dtype, may cost digits of results: "inverse", "fine", or "" for no.

    Where keys repeat or are long, the inverse amplifies what its factors were rounded by; gradients cancel where the
    cotangents of C x C products, sums over V, meet keys again. Told from the graph alone.
    """
    if n.axes == ("C", "C"):
        if "inverse" in (n.op, dict(n.attrs).get("of")):
            return "inverse"
        if n.op == "matmul":
            return "fine" if "V" in n.args[0].axes else ""
        if n.op in ("mul", "neg", "add", "columns", "mask"):  # rows, columns or pairs scaled, or summed
            grains = [_grain(a) for a in n.args]
            return "inverse" if "inverse" in grains else next(filter(None, grains), "")
    if n.axes == ("C", "V") and n.op == "matmul":
        return "fine" if all(_grain(a) for a in n.args) else ""
    return "fine" if _is_sum(n) else ""


def _is_sum(n: Node) -> bool:
    """Whether a tile of values adds up products: what tokens write after the delta rule, or its cotangent."""
    return n.op in ("add", "neg") and n.axes == ("C", "V") and any(_is_product(t) for _, t in terms(n))


def _is_product(n: Node) -> bool:
    """Whether a value is a product of tiles, perhaps with a factor."""
    return n.op == "matmul" or (n.op == "mul" and any(_is_product(a) for a in n.args))


def _triton_sum(n: Node, args: list[str]) -> str:
    axes, axis = n.args[0].axes, n.attr("axis")
    return f"tl.sum({args[0]}, {1 if axes.count(axis) == 2 else axes.index(axis)})"


def _triton_run(n: Node, args: list[str]) -> str:
    over, axes = n.attr("over"), n.args[0].axes
    if over == "all":
        return f"tl.sum({args[0]}, 0)"
    if len(axes) == 1:
        return f"_sums_of_numbers(_keep_{over}(row), {args[0]})"
    if is_exponent(n):
        return f"_sums(_keep_{over}(row), {args[0]}, {_parts(n.args[0])})"
    return f"_running_{over}({args[0]}, row, EXACT)"


def _parts(g: Node) -> str:
    """How a log-decay is split for exact sums: an input by its dtype, what is computed from inputs as float32."""
    return "GATE_PARTS" if g.op == "input" else "FLOAT_PARTS"


def is_exponent(n: Node) -> bool:
    """Whether a running sum is over log-decays: such a sum must not be a difference of two."""
    return not any(m.op == "matmul" or m.op in TREE for m in topological([n]))


def _triton_spread(n: Node, args: list[str]) -> str:
    number = literal(n)
    value = f"{number!r}" if number is not None else _aligned(args[0], n.args[0].axes, n.axes)
    return f"(tl.zeros({_shape(n.axes, _BLOCK)}, tl.float32) + {value})"


#: Triton text of the operations that are not elementwise.
_TRITON: dict[str, Callable[[Node, list[str]], str]] = {
    "matmul": _triton_matmul,
    "sum": _triton_sum,
    "run": _triton_run,
    "spread": _triton_spread,
    "valid": lambda n, args: f"tl.where({_inside(n.axes)}, {args[0]}, 0.0)",
    "mask": lambda n, args: f"tl.where(_keep_{'before' if n.attr('strict') else 'to'}(row), {args[0]}, 0.0)",
    "outer": lambda n, args: f"({args[0]}[:, None] * {args[1]}[None, :])",
    "columns": lambda n, args: f"({args[0]} * {args[1]}[None, :])",
    "diagonal": lambda n, args: f"tl.sum(tl.where(row[:, None] == row[None, :], {args[0]}, 0.0), 1)",
    "pair": lambda n, args: f"_pairs({args[0]}, row, {n.attr('left') == 'before'}, {n.attr('strict')})",
    "inverse": lambda n, args: f"_inverse({args[0]}, row, C, LEVELS, DOT, SOLVE, FINE)",
}


def _torch_matmul(n: Node, args: list[str]) -> str:
    x = f"{args[0]}.mT" if n.attr("tx") else args[0]
    y = f"{args[1]}.mT" if n.attr("ty") else args[1]
    return f"({x} @ {y})"


def _torch_sum(n: Node, args: list[str]) -> str:
    axes, axis = n.args[0].axes, n.attr("axis")
    return f"{args[0]}.sum({-1 if axes.count(axis) == 2 else axes.index(axis) - len(axes)})"


def _torch_run(n: Node, args: list[str]) -> str:
    over, size = n.attr("over"), len(n.args[0].axes)
    if over == "all":
        return f"{args[0]}.sum({-size})"
    if size == 1:
        return f"_run({args[0]}[..., None], {over!r})[..., 0]"
    return f"_run({args[0]}, {over!r})"


def _torch_spread(n: Node, args: list[str]) -> str:
    number = literal(n)
    shape = ", ".join(n.axes) + ("," if len(n.axes) == 1 else "")
    value = f"like.new_tensor({number!r})" if number is not None else _torch_aligned(args[0], n.args[0].axes, n.axes)
    return f"_spread({value}, lead, ({shape}))"


def _torch_aligned(text: str, axes: Axes, out: Axes) -> str:
    if len(axes) == 1 and len(out) == 2:
        return f"{text}[..., :, None]" if axes[0] == out[0] else f"{text}[..., None, :]"
    if not axes and out:
        return f"{text}[{', '.join(['...', *['None'] * len(out)])}]"
    return text


def _torch_valid(n: Node, args: list[str]) -> str:
    text = args[0]
    for dim in (i - len(n.axes) for i, axis in enumerate(n.axes) if axis == "C"):
        text = f"_valid({text}, T, {dim})"
    return text


def _torch_share(n: Node, args: list[str]) -> str:
    d, x, y, g = args
    own, other, kind = (x, y, "_gram_dx") if n.op == "gram_gain" else (y, x, "_gram_dy")
    return f"({own} * {kind}({d}, {other}, {g}, {n.attr('left') == 'before'}))"


def _torch_gram(n: Node, args: list[str]) -> str:
    kind = {"gram": "_gram", "gram_dx": "_gram_dx", "gram_dy": "_gram_dy"}[n.op]
    strict = f", {n.attr('strict')}" if n.op == "gram" else ""
    return f"{kind}({', '.join(args)}, {n.attr('left') == 'before'}{strict})"


_TORCH: dict[str, Callable[[Node, list[str]], str]] = {
    "matmul": _torch_matmul,
    "sum": _torch_sum,
    "run": _torch_run,
    "spread": _torch_spread,
    "valid": _torch_valid,
    "mask": lambda n, args: f"torch.tril({args[0]}, {-1 if n.attr('strict') else 0})",
    "outer": lambda n, args: f"({args[0]}[..., :, None] * {args[1]}[..., None, :])",
    "columns": lambda n, args: f"({args[0]} * {args[1]}[..., None, :])",
    "diagonal": lambda n, args: f"{args[0]}.diagonal(dim1=-2, dim2=-1)",
    "pair": lambda n, args: f"_pairs_of({args[0]}, {n.attr('left') == 'before'}, {n.attr('strict')})",
    "inverse": lambda n, args: f"_inverse_of({args[0]})",
    "gram": _torch_gram,
    "gram_dx": _torch_gram,
    "gram_dy": _torch_gram,
    "gram_gain": _torch_share,
    "gram_loss": _torch_share,
}


def _is_number(n: Node) -> bool:
    """Whether the value is a Python number in the generated code."""
    return n.op in ("const", "param") or (OPS[n.op].elementwise and all(_is_number(a) for a in n.args))


@dataclass
class _Writer:
    """Prints the nodes of one phase. ``bound`` holds what has a name in scope."""

    names: Mapping[Node, str]
    backend: str
    narrow: frozenset[Node] = frozenset()  # Triton only: tiles that may be 16 bits wide, for products
    ahead: frozenset[Node] = frozenset()  # Triton only: tiles that a scan loads while it is at the chunk before
    inlined: Mapping[Node, str] = field(default_factory=dict)
    scan: bool = False  # PyTorch only: tiles are those of one chunk

    def expression(self, n: Node, bound: Mapping[Node, str]) -> str:
        args = [self.operand(a, bound) for a in n.args]
        if n.op != "matmul":  # arithmetic is float32
            args = [f"{t}.to(tl.float32)" if a in self.narrow else t for t, a in zip(args, n.args, strict=True)]
        if n.op == "add" and self.ahead.intersection(n.args) and n.args[0].axes == n.args[1].axes:
            return f"_plus({args[0]}, {args[1]})"
        if OPS[n.op].elementwise:
            align = _aligned if self.backend == "triton" else _torch_aligned
            args = [t if _is_number(a) else align(t, a.axes, n.axes) for t, a in zip(args, n.args, strict=True)]
            template = OPS[n.op].triton if self.backend == "triton" else OPS[n.op].torch
            return template.format(*args, **dict(n.attrs))
        if n.op == "valid" and self.scan:
            return _torch_valid(n, args).replace("_valid(", "_valid_chunk(").replace(", T, ", ", T - chunk * C, ")
        table = _TRITON if self.backend == "triton" else _TORCH
        return table[n.op](n, args)

    def operand(self, n: Node, bound: Mapping[Node, str]) -> str:
        if n in bound:
            return bound[n]
        number = literal(n)
        if number is not None and n.op == "const":
            return f"{number!r}"
        if n.op == "param":
            return str(n.attr("name"))
        return self.expression(n, bound)


def _inlinable(nodes: Iterable[Node], keep: set[Node]) -> set[Node]:
    """Elementwise values read once, by an operation that prints its operand once: they need no name."""
    nodes = list(nodes)
    uses: dict[Node, int] = {}
    readers: dict[Node, Node] = {}
    for n in nodes:
        for a in n.args:
            uses[a] = uses.get(a, 0) + 1
            readers[a] = n
    out = set()
    for n in nodes:
        if n in keep or n not in readers or uses[n] != 1:
            continue
        reader = readers[n]
        prints_once = reader.op not in TREE and (not OPS[reader.op].elementwise or _prints_once(reader, n))
        if (OPS[n.op].elementwise and prints_once and contracts(reader) == contracts(n)) or literal(n) is not None:
            out.add(n)
    return out


def _prints_once(reader: Node, operand: Node) -> bool:
    mark = "{" + str(reader.args.index(operand)) + "}"
    spec = OPS[reader.op]
    return spec.torch.count(mark) == 1 and spec.triton.count(mark) == 1


# ---------------------------------------------------------------------------------------------------------------------
# Triton kernels


def kernel_context(plan: Plan, kernel: Kernel, signature: Mapping[str, tuple[str, Axes]]) -> dict[str, Any]:
    """What a skeleton needs to print one kernel."""
    held = kernel.state[:1] if kernel.state else ()
    loads = [n for n in kernel.loads if n not in held]
    narrow = frozenset(
        n for n in loads if _as_stored(kernel, n) and (not _buffered(n) or storage(n, plan) != "float32")
    )
    ahead = _ahead(kernel).intersection(loads)
    site = _Site(plan, kernel, signature, _labels(plan), _Writer(plan.names, "triton", narrow, ahead))
    names = plan.names
    bound: dict[Node, str] = {}
    blocks = []
    kept = set(kernel.stores) | ({kernel.state[1]} if kernel.state else set())
    all_nodes = kernel.nodes
    crossing = {a for p in kernel.phases for n in p.nodes for a in n.args if a in all_nodes and a not in p.nodes}
    for phase in kernel.phases:
        ended = {n for n in phase.nodes if phase.loop and contracts(n, phase.loop)}
        inline = _inlinable(phase.nodes, kept | crossing | ended | set(_tree_sums(phase.nodes).values()))
        printer = _Printer(site, phase, inline, dict(bound))
        blocks.append(printer.block())
        bound |= printer.scope
    memory = [site.memory(n) for n in loads]
    stores = [m for n in kernel.stores for m in site.stored(n)]
    state = None
    if kernel.state:
        leaf_node, new = kernel.state
        state = {"name": names[leaf_node], "next": site.writer.operand(new, bound), "keep": kernel.keep_state}
    tiles = [
        sum(1 for m in memory if tuple(m["axes"]) == ("C", axis) and (m["dtype"] == "float32" or not wide))
        for axis, wide in (("K", False), ("V", False), ("V", True), ("C", False))
    ]
    return {
        "name": kernel.name,
        "kind": kernel.kind,
        "loads": memory,
        "stores": stores,
        "blocks": blocks,
        "state": state,
        "step": kernel.step,
        "serves": kernel.serves,
        "whole_k": kernel.whole_k,
        "trees": any(n.op in TREE for n in kernel.nodes),
        "tiles": tiles if any(tiles) else [0, 1, 0, 0],  # room for one, where a scan loads none
    }


def _buffered(n: Node) -> bool:
    """Whether a value that a kernel loads comes from another launch and not from the call."""
    return n.op != "input" or dict(n.attrs).get("role") is not None or n.axes == ("K", "V")


def _ahead(kernel: Kernel) -> frozenset[Node]:
    """The tiles of a scan that Triton loads while it works on the chunk before: those that come to a product."""
    if kernel.kind != "scan":
        return frozenset()
    loads = frozenset(n for n in kernel.loads if len(n.axes) == 2)
    return loads.intersection(topological([n for n in kernel.nodes if n.op == "matmul"], frozenset(kernel.loads)))


def _as_stored(kernel: Kernel, n: Node) -> bool:
    """Whether a tile stays in memory's dtype when it is loaded, so that a scan's loads can run ahead to shared memory.

    A float32 copy in between would be transposed instead of the tile, and the load wait in the loop.
    """
    return _buffered(n) or (kernel.kind == "scan" and len(n.axes) == 2)


def _labels(plan: Plan) -> dict[Node, list[tuple[int, str]]]:
    """The results that a value is, by position and label: inputs used alike have one gradient."""
    out: dict[Node, list[tuple[int, str]]] = {}
    for i, (label, n) in enumerate(plan.program.outputs):
        out.setdefault(n, []).append((i, label))
    return out


Signature = Mapping[str, tuple[str, Axes]]


@dataclass(frozen=True)
class _Site:
    """A kernel of a plan and what is known where it is printed."""

    plan: Plan
    kernel: Kernel
    signature: Signature
    results: Mapping[Node, list[tuple[int, str]]]
    writer: _Writer

    def memory(self, n: Node) -> dict[str, Any]:
        """Where a value lives in memory: an input tensor of the call, or a tile of a buffer."""
        name = self.plan.names[n]
        entry: dict[str, Any] = {"node": n, "name": name, "axes": n.axes, "v": "V" in n.axes, "buffer": True}
        entry["dtype"] = storage(n, self.plan)
        entry["saved"] = n in self.plan.saved and not any(n in k.loads for k in self.plan.kernels)
        entry["kept"] = any(n is state for state, _, _ in self.plan.program.carried)
        entry["wide"] = not _as_stored(self.kernel, n)
        if not _buffered(n):
            heads, _ = self.signature.get(name, ("HV", ()))
            entry |= {"buffer": False, "heads": heads}
        return entry

    def stored(self, n: Node) -> list[dict[str, Any]]:
        """Where a value is written: more than one place if it is more than one result."""
        first = self.memory(n)
        entries = []
        for i, label in self.results.get(n, []):
            _, axes = self.signature.get(label[1:] if label != "o" else "v", ("HV", ("V",)))
            place = {
                "name": label,
                "buffer": False,
                "heads": "HV",
                "axes": ("C", *axes),
                "need": 1 << i,
                "label": label,
            }
            entries.append(first | place)
        return entries or [first]


def storage(n: Node, plan: Plan) -> str:
    """How a value crosses launches: in the products' dtype (dot), in float32, or by the key size in either (fine)."""
    readers = [m for m in plan.program.nodes() if n in m.args]
    if n.axes == ("C", "V") and readers and all(m.op in ("add", "neg") for m in readers):
        return "float32" if any(storage(m, plan) == "float32" for m in readers) else "fine"
    if n.axes in (("C", "V"), ("C", "C"), ("K", "V")):
        grain = _grain(n)
        amplified = any(_grain(a) == "inverse" for m in readers if m.op == "matmul" for a in m.args)
        return "float32" if grain == "inverse" or (grain and amplified) else grain or "dot"
    if n.axes == ("C", "K") and readers and all(m.op == "matmul" for m in readers):
        return "dot"
    return "float32"


@dataclass
class _Printer:
    """Orders and prints one phase: ``local`` is what has a name here, ``scope`` what later phases see."""

    site: _Site
    phase: Phase
    inline: set[Node]
    local: dict[Node, str]
    scope: dict[Node, str] = field(default_factory=dict)
    before: list[Line] = field(default_factory=list)
    body: list[Line] = field(default_factory=list)
    after: list[Line] = field(default_factory=list)

    def block(self) -> Block:
        sums = _tree_sums(self.phase.nodes)
        covered = {n for root in sums.values() for n in topological([root], frozenset(sums)) if n is not root}
        todo = [n for n in self.phase.nodes if n not in self.inline and n not in covered]
        # What a tree does not need comes after it: everything alive during the walk is held in registers.
        trees = {n for n in todo if n.op in TREE or n in sums.values()}
        loads = frozenset(self.site.kernel.loads)
        first = set(topological([a for n in todo if n in trees for a in _operands(n, sums)], loads))
        while todo:
            ready = [n for n in todo if all(self._available(a) for a in _operands(n, sums))]
            waiting = any(n in trees for n in todo)
            plain = [n for n in ready if n not in trees and (n in first or not waiting)]
            if plain:
                done = [self._statement(plain[0])]
            else:
                done = self._tree({n: _tree_terms(n, sums) for n in ready if n in trees})
            if not done:
                raise RuntimeError(f"no order for {[self.site.plan.names[n] for n in todo]}")
            todo = [n for n in todo if n not in done]
        body = sorted(self.body, key=lambda line: not self._first(line))
        return Block(self.phase.loop, tuple(self.before), tuple(body), tuple(self.after))

    def _first(self, line: Line) -> bool:
        """Whether a line comes first in a loop: a load of a tile that does not run ahead, lest it be waited for."""
        tile = line.kind == "load" and len(line.info["axes"]) == 2
        return tile and self.site.kernel.kind == "scan" and line.info["node"] not in self.site.writer.ahead

    def _summed(self, n: Node) -> bool:
        """Whether the loop of this phase sums the value, so that it is complete only after it."""
        return self.phase.loop != "" and contracts(n, self.phase.loop)

    def _available(self, n: Node) -> bool:
        if n in self.local or n in self.site.kernel.loads or is_leaf(n):
            return True
        return n in self.inline and all(self._available(a) for a in n.args)

    def _load(self, n: Node) -> None:
        """Load what the statement reads from memory and nothing has loaded; in the loop only what has its axis."""
        kernel, names, loop = self.site.kernel, self.site.plan.names, self.phase.loop
        loads = set(kernel.loads)
        for a in topological([n], frozenset(loads | set(self.local))):
            if a not in loads or a in self.local:
                continue
            self.local[a] = names[a]
            if kernel.state and a is kernel.state[0]:
                continue
            inner = loop != "" and loop in a.axes
            (self.body if inner or not loop else self.before).append(Line("load", names[a], info=self.site.memory(a)))
            if not inner:
                self.scope[a] = names[a]

    def _bind(self, n: Node) -> None:
        """Name a value and store it where it is complete."""
        name = self.local[n] = self.site.plan.names[n]
        summed = self._summed(n)
        if summed or not self.phase.loop:
            self.scope[n] = name
        if n in self.site.kernel.stores:
            (self.after if summed else self.body).extend(Line("store", name, info=m) for m in self.site.stored(n))

    def _statement(self, n: Node) -> Node:
        self._load(n)
        writer, name, summed = self.site.writer, self.site.plan.names[n], self._summed(n)
        equation = f"{name} = {show(n, _shown(writer.names, self.inline))}"
        if summed:
            self.before.append(Line("zero", name, info={"axes": n.axes}))
        code = unwrapped(writer.expression(n, self.local))
        self.body.append(Line("sum" if summed else "let", name, code, equation))
        self._bind(n)
        return n

    def _tree(self, members: Mapping[Node, list[tuple[int, Node]]]) -> list[Node]:
        """All trees of one log-decay that are ready, in one walk."""
        if not members:
            return []
        names = self.site.plan.names
        g = next(iter(members.values()))[0][1].args[-1]
        group = [n for n, parts in members.items() if parts[0][1].args[-1] is g]
        for n in group:
            for _, t in members[n]:
                self._load(t)
            where = self.before if self._summed(n) else self.body
            where.append(Line("zero", names[n], info={"axes": n.axes}))
        parts = [(names[n], sign, t) for n in group for sign, t in members[n]]
        self.body.append(_tree(parts, self.local, self.site.writer))
        for n in group:
            self._bind(n)
        return group


def _tree_sums(nodes: Iterable[Node]) -> dict[Node, Node]:
    """Tree derivatives that only ever appear in one signed sum of such, by that sum: it is accumulated as a whole."""
    nodes = list(nodes)
    here = set(nodes)
    readers: dict[Node, set[Node]] = {}
    for n in nodes:
        for a in n.args:
            readers.setdefault(a, set()).add(n)
    out: dict[Node, Node] = {}
    for root in reversed(nodes):
        if root.op not in ("add", "neg"):
            continue
        parts = [t for _, t in terms(root)]
        if not all(t.op in TREE and t.op != "gram" and t in here and t not in out for t in parts):
            continue
        inside = {n for n in topological([root], frozenset(parts)) if n is not root}
        if all(readers[n] <= inside | {root} for n in inside):
            out |= dict.fromkeys(parts, root)
    return out


def _tree_terms(n: Node, sums: Mapping[Node, Node]) -> list[tuple[int, Node]]:
    return terms(n) if n in sums.values() else [(1, n)]


def _operands(n: Node, sums: Mapping[Node, Node]) -> list[Node]:
    """What must be there before a statement: the operands, or those of every tree term that it sums."""
    return [a for _, t in terms(n) for a in t.args] if n in sums.values() else list(n.args)


def _shown(names: Mapping[Node, str], inline: set[Node]) -> dict[Node, str]:
    return {n: label for n, label in names.items() if n not in inline}


def _tree(group: list[tuple[str, int, Node]], local: Mapping[Node, str], writer: _Writer) -> Line:
    """All decayed Gram products of one log-decay, and their derivatives, in one walk over the levels."""

    def text(n: Node) -> str:
        return local.get(n) or writer.operand(n, local)

    grams: list[dict[str, Any]] = []
    sums: list[dict[str, Any]] = []
    decayed: dict[tuple[str, str, str], str] = {}
    label: dict[str, str] = {}  # a name for each operand, since one may be an expression
    cotangents: dict[str, str] = {}
    products: dict[tuple[str, str, bool], str] = {}  # (cotangent, operand, whether it is transposed): its name

    def operand(expression: str, side: str, half: str) -> str:
        label.setdefault(expression, f"operand_{len(label)}")
        return decayed.setdefault((expression, side, half), f"{half}_{len(decayed)}")

    for name, sign, n in group:
        side = "decay_before" if n.attr("left") == "before" else "decay"
        entry = {"name": name, "strict": n.attr("strict"), "assign": "+=" if sign > 0 else "-="}
        first = sign > 0 and all(name != other["name"] for other in (*grams, *sums))
        entry["equation"] = f"{name} {'=' if first else entry['assign']} {show(n, writer.names)}"
        texts = [text(a) for a in n.args[:-1]]
        if n.op == "gram":
            x, y = texts
            entry |= {"left": operand(x, side, "left"), "right": operand(y, "decay", "right")}
            grams.append(entry | {"x": label[x], "y": label[y]})
            continue
        d, x, y = texts[0], texts[-1 if n.op == "gram_dy" else 1], texts[-1]
        cotangent = cotangents.setdefault(d, f"cotangent_{len(cotangents)}")
        rows = n.op in ("gram_dx", "gram_gain")
        left = "" if n.op == "gram_dx" else operand(x, side, "left")
        right = "" if n.op == "gram_dy" else operand(y, "decay", "right")
        made = products.setdefault((cotangent, right if rows else left, not rows), f"made_{len(products)}")
        # A derivative is decayed from its product; a share of the gate's gradient, multiplied by what the product took.
        factor = {"gram_gain": left, "gram_loss": right}.get(n.op)
        sums.append(
            entry
            | {"made": made, "factor": factor, "decay": side if rows else "decay", "half": "left" if rows else "right"}
        )
    info = {
        "g": text(group[0][2].args[-1]),
        "parts": _parts(group[0][2].args[-1]),
        "decayed": [(name, *key) for key, name in decayed.items()],
        "label": label,
        "operands": [(name, expression) for expression, name in label.items()],
        "cotangents": [(name, expression) for expression, name in cotangents.items()],
        "products": [(name, *key) for key, name in products.items()],
        "grams": grams,
        "sums": sums,
        "sum_names": list(dict.fromkeys(n["name"] for n in sums)),
        "before": any(n.attr("left") == "before" for _, _, n in group),
    }
    return Line("tree", "", info=info)


# ---------------------------------------------------------------------------------------------------------------------
# PyTorch


def torch_context(plan: Plan, signature: Mapping[str, tuple[str, Axes]]) -> list[dict[str, Any]]:
    """The kernels of a plan as groups of statements: parallel ones over all chunks at once, scans in a loop."""
    writer = _Writer(plan.names, "torch")
    bound: dict[Node, str] = {}
    groups = []
    states = {s for s, _, _ in plan.program.carried}
    serves = _line_service(plan)
    for kernel in plan.kernels:
        nodes = _unique([n for n in kernel.nodes if n not in bound])
        kept = set(kernel.stores) | ({kernel.state[1]} if kernel.state else set()) | _read_later(plan, kernel)
        inline = _inlinable(nodes, kept)
        scan = writer.scan = kernel.kind == "scan"
        local = dict(bound)
        sliced: list[str] = []
        for n in kernel.loads:
            name = plan.names[n]
            local[n] = name
            if scan and n not in states:
                sliced.append(name)
                local[n] = f"{name}_here"
        lines = []
        for n in nodes:
            if n in inline:
                continue
            name = plan.names[n]
            code = unwrapped(writer.expression(n, local))
            equation = f"{name} = {show(n, _shown(plan.names, inline))}"
            lines.append(Line("let", name, code, equation, {"serves": serves.get(n, kernel.serves)}))
            local[n] = name
            if not scan:
                bound[n] = name
        state = None
        if kernel.state:
            state = {
                "name": plan.names[kernel.state[0]],
                "next": writer.operand(kernel.state[1], local),
                "keep": kernel.keep_state,
            }
        stores = [plan.names[n] for n in kernel.stores]
        for n in kernel.stores:
            bound[n] = plan.names[n]
        served = 0
        for line in lines:
            served |= line.info["serves"]
        guard = 0 if len(plan.program.carried) == 1 else _needs(plan, served)
        groups.append(
            {
                "guard": guard,
                "runs": _runs(plan, lines, scan),
                "name": kernel.name,
                "scan": scan,
                "sliced": sliced,
                "lines": lines,
                "state": state,
                "stores": stores,
                "step": kernel.step,
                "serves": kernel.serves,
            }
        )
    return groups


def _needs(plan: Plan, mask: int) -> int:
    """A mask over the program's outputs and carried ends as one over inputs and the initial state; 0 if all need it."""
    count = len(plan.program.outputs)
    out = (mask & ((1 << count) - 1)) | ((1 << count) if mask >> (count + 1) & 1 else 0)
    return 0 if out == (1 << (count + 1)) - 1 else out


def _runs(plan: Plan, lines: list[Line], scan: bool) -> list[dict[str, Any]]:
    """Statements grouped by the gradients that need them; a forward needs all of its own."""
    runs: list[dict[str, Any]] = []
    for line in lines:
        guarded = not scan and len(plan.program.carried) > 1
        mask = _needs(plan, line.info["serves"]) if guarded else 0
        if not runs or runs[-1]["mask"] != mask:
            runs.append({"mask": mask, "lines": []})
        runs[-1]["lines"].append(line)
    return runs


def _unique(nodes: list[Node]) -> list[Node]:
    return list(dict.fromkeys(nodes))


def _read_later(plan: Plan, kernel: Kernel) -> set[Node]:
    """Values of a parallel kernel that later kernels print again; as tensors they are simply kept."""
    index = plan.kernels.index(kernel)
    return {n for later in plan.kernels[index + 1 :] for n in (*later.nodes, *later.loads)}


def _line_service(plan: Plan) -> dict[Node, int]:
    """Which outputs (by bit) need a value."""
    masks: dict[Node, int] = {}
    ends = len(plan.program.outputs)
    for i, (_, n) in enumerate(plan.program.outputs):
        for m in topological([n]):
            masks[m] = masks.get(m, 0) | 1 << i
    for i, (state, new, _) in enumerate(plan.program.carried):
        below = masks.get(state, 0) | 1 << (ends + i)
        for m in topological([new]):
            masks[m] = masks.get(m, 0) | below
    return masks


# ---------------------------------------------------------------------------------------------------------------------
# One token


def step_context(variant: Variant) -> dict[str, list[Line]]:
    """The statements of one token, by emitter; inputs and the state are in scope."""
    program = pipeline.step(variant)[-1].program
    names = schedule.christened(program)
    results = {n for _, n in program.outputs}
    inline = _inlinable(program.nodes(), results)
    lines: dict[str, list[Line]] = {}
    for backend in ("triton", "torch"):
        writer = _Writer(names, backend)
        bound = {n: names[n] for n in program.nodes() if n.op == "input"}
        lines[backend] = []
        for n in program.nodes():
            if is_leaf(n) or n in inline:
                continue
            equation = f"{names[n]} = {show(n, _shown(names, inline))}"
            lines[backend].append(Line("let", names[n], unwrapped(writer.expression(n, bound)), equation))
            bound[n] = names[n]
    return lines


# ---------------------------------------------------------------------------------------------------------------------
# The file


@cache
def _environment() -> jinja2.Environment:
    env = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        line_comment_prefix="##",
    )
    env.filters["axes"] = lambda axes: ", ".join(axes)
    return env


#: Stands for the digest until the text is known.
_PLACE = "@digest@"


def digest(variant: Variant) -> str:
    """Eight hexadecimal digits over the text of the variant's file, which holds all that it computes."""
    return hashlib.sha256(_render(variant).encode()).hexdigest()[:8]


def render(variant: Variant) -> str:
    """The text of ``generated/<variant>.py``."""
    text = _render(variant)
    return text.replace(_PLACE, hashlib.sha256(text.encode()).hexdigest()[:8])


def _render(variant: Variant) -> str:
    made = plans(variant)
    signature = {name: (heads, axes) for name, heads, axes in variant.signature()}
    ahead, back = _side(made.forward, signature, "forward"), _side(made.backward, signature, "backward")
    launches = [*ahead["kernels"], *back["kernels"]]
    context = {
        "variant": variant,
        "digest": _PLACE,
        "version": VERSION,
        "inputs": [
            {
                "name": name,
                "heads": heads,
                "axes": axes,
                "role": dict(n.attrs)["role"],
                "log_decay": variant.decay.op == "exp" and variant.decay.args[0] is n,
            }
            for n, (name, heads, axes) in zip(variant.inputs, variant.signature(), strict=True)
        ],
        "forward": ahead,
        "backward": back,
        "step": step_context(variant),
        "fine_k": schedule.FINE_K,
        "whole_k": tuple(k["key"] for k in launches if k["whole_k"]),
        "walk_k": tuple(k["key"] for k in launches if not k["whole_k"]),
        "trees": tuple(k["key"] for k in launches if k["trees"]),
        "configs": _configs((*made.forward.kernels, *made.backward.kernels)),
        "glossary": _glossary(made),
    }
    return _environment().get_template("module.py.j2").render(context)


def _configs(kernels: Sequence[Kernel]) -> list[tuple[Any, ...]]:
    """The rows of the table, each with the options of the kernels that are there."""
    there = {k.name: k for k in sorted(kernels, key=schedule.trees)}  # of two of one name the one with more trees
    return [
        (*row[:-1], [(name, schedule.options_of(there[name], row[-1])) for name, _ in row[-1] if name in there])
        for row in schedule.CONFIGS
    ]


def _side(plan: Plan, signature: Mapping[str, tuple[str, Axes]], side: str) -> dict[str, Any]:
    kernels = [kernel_context(plan, k, signature) for k in plan.kernels]
    inputs = (1 << len(signature)) - 1
    carried = 1 << (len(signature) + 1)  # the end of the reverse scan is the initial state's cotangent
    for k in kernels:
        k["key"] = f"{side}.{k['name']}"
        k["serves_inputs"] = (k["serves"] & inputs) | ((1 << len(signature)) if k["serves"] & carried else 0)
    return {
        "kernels": kernels,
        "result": {label: plan.names.get(n, "") for label, n in plan.program.outputs},
        "torch": torch_context(plan, signature),
        "saved": [{"name": plan.names[n], "axes": n.axes, "dtype": storage(n, plan)} for n in plan.saved],
        "outputs": [(label, plan.names.get(n), n) for label, n in plan.program.outputs],
        "program": list(plan.program.lines()),
    }


_WORDS = {
    "QL": "scaled queries, decayed from the chunk's start",
    "BL": "erase vectors b, decayed from the chunk's start",
    "KT": "keys, decayed to the chunk's end",
    "AT": "write vectors a, decayed to the chunk's end",
    "Aqk": "decayed products of queries and keys, lower triangle",
    "Aqa": "decayed products of queries and write vectors, lower triangle",
    "Abk": "decayed products of erase vectors and keys, strictly lower",
    "N": "decayed products of erase and write vectors, strictly lower",
    "E": "(I + N)^-1",
    "W": "E BL: what the state before the chunk loses, a token",
    "U": "E applied to the values: what is written if the state before the chunk is 0",
    "V2": "the low-rank term's values",
    "Vnew": "values after the delta rule",
    "Gc": "decay over the whole chunk",
    "S": "state before the chunk, [K, V]",
    "dS": "cotangent of the state after the chunk",
    "do": "cotangent of o",
}


def _glossary(made: Plans) -> list[tuple[str, str]]:
    used = set(made.forward.names.values()) | set(made.backward.names.values())
    return [(name, text) for name, text in _WORDS.items() if name in used]


def write_if_changed(path: Path, text: str) -> bool:
    """Write a file atomically unless it already holds the text; any number of processes may do so at once."""
    if path.exists() and path.read_text(encoding="utf-8") == text:
        return False
    path.parent.mkdir(parents=True, exist_ok=True)
    # The names of another's unfinished file, of another process or thread, must differ.
    scratch = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}.tmp")
    try:
        scratch.write_text(text, encoding="utf-8")
        scratch.replace(path)
    finally:
        scratch.unlink(missing_ok=True)
    return True


def emit(variant: Variant, folder: Path) -> Path:
    """Write the variant's file into the folder and give its path."""
    path = folder / f"{variant.name}.py"
    write_if_changed(path, render(variant))
    return path
