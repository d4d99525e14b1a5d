"""The graph of a program with the kernels it is cut into as boxes, as Mermaid text or as an SVG image.

A box holds what one launch loads at the top and what it computes below, in layers by depth. Values that are cheap and
read once are drawn inside the equation that reads them. A dashed line is a value that goes through memory from one
launch to a later one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape

import networkx as nx

from dplrgen.ir import OPS, Node, show
from dplrgen.schedule import Kernel, Plan, is_leaf

__all__ = ["Box", "Item", "Picture", "mermaid", "picture", "svg"]


@dataclass(frozen=True)
class Item:
    """A drawn value: its name, its equation (empty for a load), and load, product, solve or cheap."""

    id: str
    name: str
    equation: str
    kind: str
    stored: bool = False


@dataclass(frozen=True)
class Box:
    """A kernel: the drawn values in layers, edges between them by id, and the carried value's next and itself."""

    title: str
    layers: tuple[tuple[Item, ...], ...]
    edges: tuple[tuple[str, str], ...]
    carried: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Picture:
    """The boxes in launch order, and the values that go from one to a later one."""

    title: str
    boxes: tuple[Box, ...]
    links: tuple[tuple[str, str], ...]


# ---------------------------------------------------------------------------------------------------------------------
# From a plan to boxes


def picture(plan: Plan) -> Picture:
    """What is drawn of a plan."""
    boxes: list[Box] = []
    links: list[tuple[str, str]] = []
    produced: dict[Node, str] = {}
    for number, kernel in enumerate(plan.kernels):
        drawn = _drawn(kernel)
        ids = {n: f"k{number}_{i}" for i, n in enumerate((*_loads(kernel), *drawn))}
        links += [(produced[n], ids[n]) for n in _loads(kernel) if n in produced]
        boxes.append(_box(plan, kernel, drawn, ids))
        produced |= {n: ids[n] for n in kernel.stores if n in ids}
        if kernel.state is not None and kernel.keep_state:
            produced[kernel.state[0]] = ids[kernel.state[0]]
    return Picture(plan.program.name, tuple(boxes), tuple(links))


def _loads(kernel: Kernel) -> tuple[Node, ...]:
    """Loads, the carried value of a scan among them."""
    state = () if kernel.state is None else (kernel.state[0],)
    return tuple(dict.fromkeys((*kernel.loads, *state)))


def _drawn(kernel: Kernel) -> tuple[Node, ...]:
    """Values with an item of their own: all but the cheap ones that one equation reads."""
    nodes = tuple(dict.fromkeys(n for n in kernel.nodes if not is_leaf(n)))
    readers = {n: sum(n in m.args for m in nodes) for n in nodes}
    kept = {*kernel.stores, *(kernel.state or ())}
    return tuple(n for n in nodes if OPS[n.op].cost != "cheap" or readers[n] != 1 or n in kept)


def _box(plan: Plan, kernel: Kernel, drawn: Sequence[Node], ids: Mapping[Node, str]) -> Box:
    inner = _graph(drawn, ids)
    # Loads and drawn values print as their names, whatever stands between is written out.
    names = {n: plan.names[n] for n in ids}
    items = {n: Item(ids[n], names[n], "", "load") for n in _loads(kernel)}
    items |= {n: Item(ids[n], names[n], show(n, names), OPS[n.op].cost, n in kernel.stores) for n in drawn}
    layers = [sorted(layer, key=list(ids).index) for layer in nx.topological_generations(inner)]
    place = f"one program a {'head and block of columns' if kernel.kind == 'scan' else 'chunk and head'}"
    return Box(
        f"{kernel.name}: {place}{', last chunk first' if kernel.step < 0 else ''}",
        tuple(tuple(items[n] for n in layer) for layer in _untangled(inner, layers)),
        tuple((ids[a], ids[b]) for a, b in inner.edges),
        () if kernel.state is None else ((ids[kernel.state[1]], ids[kernel.state[0]]),),
    )


def _graph(drawn: Sequence[Node], ids: Mapping[Node, str]) -> nx.DiGraph:
    """Edges between drawn values, through those that are not."""
    g = nx.DiGraph()
    g.add_nodes_from(ids)
    for n in drawn:
        g.add_edges_from((a, n) for a in _below(n, ids))
    return g


def _below(n: Node, ids: Mapping[Node, str]) -> Iterator[Node]:
    for a in n.args:
        if a in ids:
            yield a
        else:
            yield from _below(a, ids)


def _untangled(g: nx.DiGraph, layers: Sequence[list[Node]]) -> list[list[Node]]:
    """Each layer in the order of the mean position of what its values read: fewer lines cross."""
    at: dict[Node, float] = {}
    out: list[list[Node]] = []
    for layer in layers:
        middle = {n: _mean([at[a] for a in g.predecessors(n)]) for n in layer}
        ordered = sorted(layer, key=middle.__getitem__)
        at |= {n: (i + 0.5) / len(ordered) for i, n in enumerate(ordered)}
        out.append(ordered)
    return out


def _mean(numbers: Sequence[float]) -> float:
    return sum(numbers) / len(numbers) if numbers else 0.0


# ---------------------------------------------------------------------------------------------------------------------
# Mermaid


def mermaid(drawn: Picture) -> str:
    """A flowchart, a subgraph a kernel."""
    lines = ["---", f"title: {drawn.title}", "---", "flowchart TB"]
    for number, box in enumerate(drawn.boxes):
        lines.append(f'  subgraph k{number}["{_quoted(box.title)}"]')
        for item in (item for layer in box.layers for item in layer):
            text = f"{item.name} = {item.equation}" if item.equation else item.name
            opened, closed = ('(["', '"])') if item.kind == "load" else ('["', '"]')
            lines.append(f"    {item.id}{opened}{_quoted(text)}{closed}")
        lines += [f"    {a} --> {b}" for a, b in box.edges]
        lines += [f"    {a} -- carried --> {b}" for a, b in box.carried]
        lines.append("  end")
    lines += [f"  {a} -.-> {b}" for a, b in drawn.links]
    return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    for mark, entity in (("#", "#35;"), ('"', "#quot;"), ("<", "#lt;"), (">", "#gt;")):
        text = text.replace(mark, entity)
    return text


# ---------------------------------------------------------------------------------------------------------------------
# SVG

_CHARACTER, _TEXT, _LINE, _GAP, _ROW_GAP, _PAD = 6.7, 11, 15, 14, 26, 18
_LONGEST, _WIDEST = 44, 1500.0
_LEGEND = "blue: products, orange: solves, green edge: stored, dashed: through memory, red: to the next chunk"
_FILL = {"load": "#eef2f7", "product": "#d6e6ff", "solve": "#ffdfc2", "cheap": "#ffffff"}


@dataclass(frozen=True)
class _Place:
    """Where an item stands."""

    item: Item
    x: float
    y: float
    width: float
    height: float


def svg(drawn: Picture) -> str:
    """An image with a box a kernel, in launch order from the top."""
    inner = max(_breadth(box) for box in drawn.boxes) if drawn.boxes else 0.0
    parts: list[str] = []
    places: dict[str, _Place] = {}
    y = 2.0 * _PAD + 2 * _LINE
    for box in drawn.boxes:
        inside, height = _arranged(box, y + _LINE + _PAD, inner)
        places |= inside
        frame = height + _LINE + 2 * _PAD
        parts.append(_frame(box.title, y, inner + 2 * _PAD, frame))
        parts += [_line(inside[a], inside[b], "") for a, b in box.edges]
        parts += [_return(inside[a], inside[b], inside.values()) for a, b in box.carried]
        y += frame + _ROW_GAP
    parts += [_line(places[a], places[b], ' stroke-dasharray="4 3"') for a, b in drawn.links]
    parts += [line for place in places.values() for line in _drawing(place)]
    return "\n".join((*_head(drawn.title, inner + 4 * _PAD, y), *parts, "</svg>")) + "\n"


def _head(title: str, width: float, height: float) -> Iterator[str]:
    yield (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}" '
        f'viewBox="0 0 {width:.0f} {height:.0f}" font-family="monospace" font-size="{_TEXT}">'
    )
    yield (
        '<defs><marker id="arrow" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="6" markerHeight="6" orient="auto">'
        '<path d="M0 0 L8 4 L0 8 z" fill="#667"/></marker></defs>'
    )
    yield '<rect width="100%" height="100%" fill="white"/>'
    yield f'<text x="{_PAD}" y="{_PAD + _TEXT}" font-size="14" font-weight="bold">{escape(title)}</text>'
    yield f'<text x="{_PAD}" y="{_PAD + _TEXT + _LINE}">{_LEGEND}</text>'


def _breadth(box: Box) -> float:
    rows = [_width(row) for layer in box.layers for row in _rows(layer)]
    return max([_CHARACTER * len(box.title), _CHARACTER * len(_LEGEND) - 2 * _PAD, *rows])


def _arranged(box: Box, top: float, breadth: float) -> tuple[dict[str, _Place], float]:
    """Layers below each other, centred, a layer that is too wide on several rows; and the height they take."""
    places: dict[str, _Place] = {}
    y = top
    for row in (row for layer in box.layers for row in _rows(layer)):
        x, height = 2 * _PAD + (breadth - _width(row)) / 2, max(_size(item)[1] for item in row)
        for item in row:
            width, own = _size(item)
            places[item.id] = _Place(item, x, y + (height - own) / 2, width, own)
            x += width + _GAP
        y += height + _ROW_GAP
    return places, y - _ROW_GAP - top


def _rows(layer: Sequence[Item]) -> Iterator[list[Item]]:
    row: list[Item] = []
    for item in layer:
        if row and _width([*row, item]) > _WIDEST:
            yield row
            row = []
        row.append(item)
    if row:
        yield row


def _width(row: Sequence[Item]) -> float:
    return sum(_size(item)[0] for item in row) + _GAP * (len(row) - 1)


def _size(item: Item) -> tuple[float, float]:
    longest = max(len(item.name), len(_elided(item.equation)))
    return longest * _CHARACTER + _PAD, (2 if item.equation else 1) * _LINE + 8.0


def _elided(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."


def _frame(title: str, y: float, width: float, height: float) -> str:
    return (
        f'<rect x="{_PAD}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" rx="8" fill="#fafbfc" stroke="#99a"/>'
        f'<text x="{2 * _PAD}" y="{y + _PAD:.1f}" font-weight="bold">{escape(title)}</text>'
    )


def _line(a: _Place, b: _Place, style: str) -> str:
    x0, y0, x1, y1 = a.x + a.width / 2, a.y + a.height, b.x + b.width / 2, b.y
    bend = max(14.0, (y1 - y0) / 3)
    path = f"M{x0:.1f} {y0:.1f} C{x0:.1f} {y0 + bend:.1f} {x1:.1f} {y1 - bend:.1f} {x1:.1f} {y1:.1f}"
    return f'<path d="{path}" fill="none" stroke="#667" stroke-opacity="0.55"{style} marker-end="url(#arrow)"/>'


def _return(a: _Place, b: _Place, around: Iterable[_Place]) -> str:
    """A carried value's way back to the top, right of all that lies between."""
    x0, y0, x1, y1 = a.x + a.width, a.y + a.height / 2, b.x + b.width / 2, b.y
    x = max(place.x + place.width for place in around) + _PAD / 2
    path = f"M{x0:.1f} {y0:.1f} L{x:.1f} {y0:.1f} L{x:.1f} {y1 - 10:.1f} L{x1:.1f} {y1 - 10:.1f} L{x1:.1f} {y1:.1f}"
    return f'<path d="{path}" fill="none" stroke="#b3261e" marker-end="url(#arrow)"/>'


def _drawing(place: _Place) -> Iterator[str]:
    item, middle = place.item, place.x + place.width / 2
    border = ' stroke="#1b6b3a" stroke-width="2"' if item.stored else ' stroke="#99a"'
    yield (
        f"<g><title>{escape(f'{item.name} = {item.equation}' if item.equation else item.name)}</title>"
        f'<rect x="{place.x:.1f}" y="{place.y:.1f}" width="{place.width:.1f}" height="{place.height:.1f}" '
        f'rx="{10 if item.kind == "load" else 3}" fill="{_FILL[item.kind]}"{border}/>'
    )
    y = place.y + _LINE
    yield f'<text x="{middle:.1f}" y="{y:.1f}" text-anchor="middle" font-weight="bold">{escape(item.name)}</text>'
    if item.equation:
        equation = escape(_elided(item.equation))
        yield f'<text x="{middle:.1f}" y="{y + _LINE:.1f}" text-anchor="middle">{equation}</text>'
    yield "</g>"
