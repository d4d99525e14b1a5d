"""The cut of a program into kernels.

Questions about the graph are asked of a networkx DiGraph: what lies on a cycle through a carried state is sequential
over chunks and makes a *scan*; the rest is parallel over chunks. Then six rules place every value:

1. A scan is cut along the value axis, so nothing that contracts over V can ride in it. If nothing downstream of a state
   contracts over V, all of it rides in the scan and the states never reach memory; otherwise the scan does its cycle.
2. Elementwise work and running sums over inputs are recomputed in every parallel kernel that wants them; scans load
   them, since a scan's time is its length.
3. A parallel kernel walks V in blocks, and K too if no operation has both axes and no product is needed in two walks;
   products without a value axis that need a finished contraction over V go to a
   kernel of their own, so they run once, with registers to themselves.
4. Decayed Gram products with left operands of their own go to a launch each.
5. A state-sized product rides in the scan that reads it: its operands are smaller than it is.
6. The C x C matrices that cost a tree or an inverse, and that the backward multiplies with, are saved by the forward.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import networkx as nx

from dplrgen.errors import IRError
from dplrgen.ir import OPS, Node, Program, leaf, show, substitute, topological

__all__ = [
    "CONFIGS",
    "FINE_K",
    "TREE",
    "Kernel",
    "Options",
    "Phase",
    "Plan",
    "Table",
    "christened",
    "contracts",
    "graph",
    "has",
    "is_leaf",
    "options_of",
    "plan",
    "saved_values",
    "trees",
]

Slot = tuple[int, int]  # stage, part of a launch

TREE = frozenset({"gram", "gram_dx", "gram_dy", "gram_gain", "gram_loss"})


LAUNCHERS = frozenset({"N"})
"""Names of values that launchers have for sizes: what crosses launches is a variable there and takes another name."""


@dataclass(frozen=True)
class Phase:
    """A run of equations of a kernel; ``loop`` is K or V for those in a loop over blocks of that axis, else empty."""

    loop: str
    nodes: tuple[Node, ...]


@dataclass(frozen=True)
class Kernel:
    """One launch.

    ``loads`` are leaves and values stored by earlier launches; ``stores`` are read by later ones or are results.
    ``state`` is the carried value of a scan and its next; ``step`` its direction; ``keep_state`` asks for the value
    before every chunk to be stored.
    """

    name: str
    kind: str  # parallel or scan
    loads: tuple[Node, ...]
    phases: tuple[Phase, ...]
    stores: tuple[Node, ...]
    state: tuple[Node, Node] | None = None
    step: int = 1
    keep_state: bool = False
    whole_k: bool = True  # tiles span the keys; otherwise K is walked in blocks
    serves: int = 0  # bit mask over the program's outputs (and one more bit a carried value's end) that need it

    @property
    def nodes(self) -> list[Node]:
        return [n for phase in self.phases for n in phase.nodes]


@dataclass(frozen=True)
class Plan:
    """A program cut into kernels, in launch order, with a name for every value that crosses a boundary."""

    program: Program
    kernels: tuple[Kernel, ...]
    saved: tuple[Node, ...]
    names: Mapping[Node, str]


def graph(program: Program) -> nx.DiGraph:
    """The program as a graph, operands to results, with an edge from each carried value's next back to it."""
    g = nx.DiGraph()
    for n in program.nodes():
        g.add_node(n)
        g.add_edges_from((a, n) for a in n.args)
    g.add_edges_from((new, state) for state, new, _ in program.carried)
    return g


def contracts(n: Node, axis: str = "V") -> bool:
    """Whether the operation sums over the axis."""
    if n.op == "sum":
        return bool(n.attr("axis") == axis)
    if n.op == "matmul":
        return bool(n.args[0].axes[0 if n.attr("tx") else 1] == axis)
    return n.op == "gram" and axis == "K"


def has(n: Node, axis: str) -> bool:
    """Whether the operation reads or makes values along the axis."""
    return axis in n.axes or contracts(n, axis)


def is_leaf(n: Node) -> bool:
    return n.op in ("input", "param", "const") or (n.op == "spread" and n.args[0].op == "const")


def saved_values(forward: Program, backward: Program) -> list[Node]:
    """Rule 6: the C x C operands of products that both programs form."""
    there = set(backward.nodes())
    operands = {a for n in forward.nodes() if n.op == "matmul" for a in n.args}
    operands = {_unscaled(n) for n in operands}  # a scale is cheap, what it scales is not
    square = [n for n in forward.nodes() if n.axes == ("C", "C") and n in operands and n in there]
    return [n for n in square if any(OPS[m.op].cost != "cheap" for m in topological([n]))]


def _unscaled(n: Node) -> Node:
    """A matrix without the factors of its rows or columns."""
    if n.op == "columns":
        return _unscaled(n.args[0])
    if n.op == "mul" and {a.axes for a in n.args} == {("C",), ("C", "C")}:
        return next(_unscaled(a) for a in n.args if a.axes == ("C", "C"))
    return n


def plan(program: Program, saved: Iterable[Node] = (), load_saved: bool = False) -> Plan:
    """Cut a program. ``saved`` values are stored (forward), or come as inputs if ``load_saved`` (backward)."""
    saved = tuple(saved)
    names = {n: label for n, label in program.names.items() if n not in saved or label not in LAUNCHERS}
    for number, n in enumerate(saved):
        names.setdefault(n, "E" if n.op == "inverse" else f"M{number}")
    if load_saved:
        program, saved, names = _load(program, saved, names)
    stage = _stages(program)
    cheap = _recomputable(program)
    place = _placement(program, stage, cheap)
    kernels = _kernels(program, place, cheap, () if load_saved else saved)
    _ordered(program, kernels)
    stored = {n for k in kernels for n in k.stores}
    names = {n: label for n, label in names.items() if n not in stored or label not in LAUNCHERS}
    return Plan(program, tuple(kernels), saved, christened(program, names))


def _ordered(program: Program, kernels: Iterable[Kernel]) -> None:
    """IRError if a launch reads what no earlier one has written."""
    written = {s for s, _, _ in program.carried}
    for k in kernels:
        missing = [n for n in k.loads if n.op != "input" and n not in written]
        if missing:
            raise IRError(f"{program.name}: {k.name} reads {show(missing[0])} before it is written")
        written |= set(k.stores)


def _load(
    program: Program, saved: tuple[Node, ...], names: dict[Node, str]
) -> tuple[Program, tuple[Node, ...], dict[Node, str]]:
    leaves = {n: leaf(names[n], n.axes, role="saved", of=n.op) for n in saved}
    table = substitute(program.roots(), leaves)
    outputs = tuple((k, table[n]) for k, n in program.outputs)
    carried = tuple((s, table[n], d) for s, n, d in program.carried)
    names = {table.get(n, n): label for n, label in names.items() if n not in leaves and n in table}
    return Program(program.name, outputs, carried, names), tuple(leaves.values()), names


def _stages(program: Program) -> dict[Node, int]:
    """Even stages are parallel, odd ones scans in the order of the carried values."""
    g = graph(program)
    where = {n: 2 * i + 1 for i, (s, _, _) in enumerate(program.carried) for n in _cycle(g, s)}
    for i, (state, _, _) in enumerate(program.carried):
        below = [n for n in nx.descendants(g, state) if n not in where]
        if not any(contracts(n) for n in below):
            where |= dict.fromkeys(below, 2 * i + 1)
    stage: dict[Node, int] = {}
    for n in program.nodes():
        first = max((stage[a] for a in n.args), default=0)
        if n in where:
            if first > where[n]:
                raise IRError(f"{program.name}: a scan needs a value that only a later launch has")
            stage[n] = where[n]
        else:
            stage[n] = first + first % 2
    stage = _latest(program, stage)
    for n in reversed(program.nodes()):  # readers first: a product under a sign or a factor follows it
        readers = {stage[r] for r in g.successors(n)}
        if n.axes == ("K", "V") and stage[n] == 0 and n.args and len(readers) == 1 and min(readers) % 2 == 1:
            stage[n] = min(readers)
    return stage


def _cycle(g: nx.DiGraph, state: Node) -> set[Node]:
    component = next(c for c in nx.strongly_connected_components(g) if state in c)
    return set(component) | {state}


def _latest(program: Program, stage: dict[Node, int]) -> dict[Node, int]:
    """Parallel work waits for the last parallel stage unless a scan reads it: there it meets its like."""
    order = program.nodes()
    cheap = _recomputable(program)
    last = max(s + s % 2 for s in stage.values())
    readers: dict[Node, list[Node]] = {}
    for n in order:
        for a in n.args:
            readers.setdefault(a, []).append(n)
    for n in reversed(order):
        if stage[n] >= 2 and stage[n] % 2 == 0:
            nearest = min((stage[r] for r in readers.get(n, [])), default=last)
            stage[n] = nearest - nearest % 2
        elif stage[n] == 0 and n in readers and n not in cheap and all(stage[r] == last for r in readers[n]):
            stage[n] = last
    return stage


def _recomputable(program: Program) -> set[Node]:
    """Rule 2: cheap operations over inputs alone."""
    states = {s for s, _, _ in program.carried}
    cheap: set[Node] = set()
    for n in program.nodes():
        if n not in states and OPS[n.op].cost == "cheap" and all(a in cheap for a in n.args) and not contracts(n):
            cheap.add(n)
    return cheap


def _placement(program: Program, stage: dict[Node, int], cheap: set[Node]) -> dict[Node, tuple[int, int]]:
    """Rule 3: (stage, part) of every value that is not a leaf."""
    order = program.nodes()
    part: dict[Node, int] = {}
    summed: set[Node] = set()  # depends on a contraction over V of its own stage
    for n in order:
        mates = [a for a in n.args if stage.get(a) == stage[n] and a not in cheap]
        after = contracts(n) or any(a in summed for a in mates)
        if after:
            summed.add(n)
        behind = OPS[n.op].cost != "cheap" and not has(n, "V") and any(a in summed for a in mates)
        part[n] = max([part[a] for a in mates] + [int(behind and stage[n] > 0 and stage[n] % 2 == 0)])
    apart = _own_launch(program, stage)
    for n in order:
        if stage[n] == 0 and not is_leaf(n):
            part[n] = int(n in apart)
    results = {n for _, n in program.outputs}
    readers: dict[Node, list[Node]] = {}
    for n in order:
        for a in n.args:
            readers.setdefault(a, []).append(n)
    for n in reversed(order):
        if stage[n] == 0:
            continue
        mates = [r for r in readers.get(n, []) if stage[r] == stage[n]]
        sinkable = OPS[n.op].cost == "cheap" and not has(n, "V") and n not in results and n not in cheap
        # A value that takes the place of the contraction it reads costs no more to store.
        sinkable = sinkable and not any(contracts(a) and a.axes == n.axes and readers[a] == [n] for a in n.args)
        if stage[n] % 2 == 0 and sinkable and mates and len(mates) == len(readers[n]):
            part[n] = min(part[r] for r in mates)
    for _, n in program.outputs:  # results without a value axis wait, so that they are written in one place
        if stage[n] % 2 == 0 and stage[n] > 0 and not has(n, "V") and OPS[n.op].cost == "cheap" and not is_leaf(n):
            part[n] = max([p for m, p in part.items() if stage[m] == stage[n]])
    for n in order:  # what reads a value that waits waits with it
        read = [part[a] for a in n.args if stage.get(a) == stage[n] and a not in cheap and not is_leaf(a)]
        if stage[n] % 2 == 0 and stage[n] > 0 and not is_leaf(n):
            part[n] = max([part[n], *read])
    second = _second_walk(program, {n: (stage[n], part[n]) for n in order}, cheap)
    return {n: (stage[n], part[n] + int(n in second)) for n in order}


def _second_walk(program: Program, place: Mapping[Node, Slot], cheap: set[Node]) -> set[Node]:
    """What reads, along K, a sum over K of products of its own launch: it would take a second walk over those products.

    Kept together they would need tiles that span the keys. Apart, the products are stored once and read once.
    """
    product: set[Node] = set()  # made along K by, or from, a product of its own launch
    after: set[Node] = set()
    for n in program.nodes():
        mates = [a for a in n.args if place[a] == place[n] and a not in cheap and not is_leaf(a)]
        if has(n, "V") or place[n][0] == 0 or place[n][0] % 2 == 1:
            continue
        if "K" in n.axes and (OPS[n.op].cost != "cheap" or any(a in product for a in mates)):
            product.add(n)
        if any(a in after or (contracts(a, "K") and any(b in product for b in a.args)) for a in mates):
            after.add(n)
    if not any("K" in n.axes for n in after):
        return set()
    read = {a for n in after for a in n.args}
    return after | {n for _, n in program.outputs if n in read}  # a result is not read back


def _own_launch(program: Program, stage: Mapping[Node, int]) -> set[Node]:
    """Rule 4: the work of the first parallel stage that hangs on one left operand's own inputs (the queries).

    Two trees in one kernel share the decays but not the registers; apart, each keeps more blocks on the chip.
    """
    first = [n for n in program.nodes() if stage[n] == 0]
    lefts = list(dict.fromkeys(n.args[0] for n in first if n.op == "gram"))
    for left in lefts:
        others = [a for n in first if n.op == "gram" and n.args[0] is not left for a in n.args]
        shared = set(topological(others)) | {n.args[1] for n in first if n.op == "gram"}
        own = {m for m in topological([left]) if m.op == "input" and m not in shared}
        hanging: set[Node] = set()
        for n in first:
            if n in own or any(a in hanging for a in n.args):
                hanging.add(n)
        hanging -= own
        if others and own and not any(n.op == "inverse" for n in hanging):
            return hanging
    return set()


_KIND = {0: "prepare", 1: "scan", 2: "between", 3: "reverse", 4: "finish"}


def _kernels(
    program: Program, place: dict[Node, tuple[int, int]], cheap: set[Node], saved: tuple[Node, ...]
) -> list[Kernel]:
    order = program.nodes()
    results = [n for _, n in program.outputs]
    states = {s: (new, step) for s, new, step in program.carried}
    slots = sorted({place[n] for n in order})
    owner = {n: place[n] for n in order if not is_leaf(n) and n not in states}
    wanted: dict[tuple[int, int], list[Node]] = {slot: [] for slot in slots}
    made: list[Kernel] = []
    # A recomputable value belongs to whoever reads it; scans read it from the first kernel.
    for slot in slots:
        for n in order:
            if owner.get(n) != slot or (n in cheap and not _stored_cheap(n, order, owner, results, saved)):
                continue
            wanted[slot].append(n)
    for slot in slots:
        if not wanted[slot]:
            continue
        made.append(_kernel(slot, wanted, owner, cheap, states, {*results, *saved}))
    return _with_service(program, made)


def _stored_cheap(
    n: Node, order: list[Node], owner: Mapping[Node, Slot], results: list[Node], saved: tuple[Node, ...]
) -> bool:
    """Whether the first kernel must store a recomputable value: a scan reads it, or it is a result."""
    read_by_scan = any(n in m.args and owner.get(m, (0, 0))[0] % 2 == 1 for m in order)
    return read_by_scan or n in saved or n in results


def _kernel(
    slot: Slot,
    wanted: Mapping[Slot, list[Node]],
    owner: Mapping[Node, Slot],
    cheap: set[Node],
    states: Mapping[Node, tuple[Node, int]],
    kept_values: set[Node],
) -> Kernel:
    stage, part = slot
    scan = stage % 2 == 1
    mine = set(wanted[slot])
    elsewhere = {n for s, ns in wanted.items() if s != slot for n in ns}
    state = next((s for s in states if stage == 2 * list(states).index(s) + 1), None) if scan else None

    def external(n: Node) -> bool:
        if is_leaf(n) or (n in states and n is not state):
            return True
        if n in mine:
            return False
        stored = n in elsewhere and owner[n] < slot
        return stored if scan or _costs_a_run(n) else n not in cheap

    roots = list(wanted[slot])
    stop = frozenset(n for n in topological(roots) if external(n))
    body = [n for n in topological(roots, stop) if n not in stop and n is not state]
    loads = tuple(n for n in topological(roots, stop) if n in stop and (n.op == "input" or not is_leaf(n)))
    later = [m for s, ns in wanted.items() if s != slot for m in ns]
    readers = _reached(later, cheap)
    stores = tuple(n for n in wanted[slot] if n in readers or n in kept_values)
    name = _KIND[stage] + ("" if part == 0 else f"_{part}")
    new, step = states[state] if state is not None else (None, 1)
    kept = state is not None and any(state in m.args for m in later)
    phases, whole = ((Phase("", tuple(body)),), True) if scan else _walks(body, frozenset(stores))
    pair = (state, new) if state is not None and new is not None else None
    return Kernel(name, "scan" if scan else "parallel", loads, phases, stores, pair, step, kept, whole)


def _costs_a_run(n: Node) -> bool:
    return any(m.op == "run" for m in topological([n]))


def _reached(roots: list[Node], cheap: set[Node]) -> set[Node]:
    """Operands that the given values read directly, through recomputable ones too."""
    reached: set[Node] = set()
    stack = [a for n in roots for a in n.args]
    while stack:
        n = stack.pop()
        if n not in reached:
            reached.add(n)
            stack.extend(n.args if n in cheap else ())
    return reached


def _walks(body: list[Node], kept: frozenset[Node]) -> tuple[tuple[Phase, ...], bool]:
    """The phases of a parallel kernel, with K walked in blocks where that can be, and whether it is not."""
    if not any(has(n, "K") and has(n, "V") for n in body):
        try:
            return _phases(body, ("K", "V"), kept), False
        except IRError:
            pass  # a product would be needed in two walks over K
    return _phases(body, ("V",), kept), True


def _phases(body: list[Node], loops: tuple[str, ...], kept: frozenset[Node]) -> tuple[Phase, ...]:
    """Phases in order: even ones without a loop, odd ones in loops. A contraction ends its loop.

    A cheap value that two loops want is computed in both; IRError if a product were. ``kept`` values are stored.
    """
    walk = {n: next((axis for axis in loops if has(n, axis)), "") for n in body}
    number: dict[Node, int] = {}
    for n in body:
        first = 0
        for a in n.args:
            if a in number:
                same = walk[n] == walk[a] and not (walk[a] and contracts(a, walk[a]))
                first = max(first, number[a] + (0 if same or not walk[a] else 1))
        number[n] = first + ((first + 1) % 2 if walk[n] else first % 2)
    _put_off(body, walk, number)
    phases: list[Phase] = []
    for p in range(max(number.values(), default=0) + 1):
        for axis in ("", *loops):
            mine = [n for n in body if number[n] == p and walk[n] == axis]
            if not mine:
                continue
            again = {n for n in topological(mine) if axis and number.get(n, p) < p and axis in n.axes}
            if any(OPS[n.op].cost != "cheap" for n in again):
                raise IRError(f"a product would be needed in two loops over {axis} of one kernel")
            here = [n for n in body if n in again or n in mine]
            used = set(topological([n for n in here if not axis or n in kept or contracts(n, axis)]))
            if any(n in used for n in here):
                phases.append(Phase(axis, tuple(n for n in here if n in used)))
    return tuple(phases)


def _put_off(body: list[Node], walk: Mapping[Node, str], number: dict[Node, int]) -> None:
    """Move what stands between loops to just before it is read, so that no loop holds what it does not use.

    What one loop makes moves to the loop that reads it, so that no product is needed in two.
    """
    readers: dict[Node, list[Node]] = {}
    for n in body:
        for a in n.args:
            readers.setdefault(a, []).append(n)
    for n in reversed(body):
        if n not in readers:
            continue
        if not walk[n]:
            number[n] = max(number[n], min(number[r] - number[r] % 2 for r in readers[n]))
        elif OPS[n.op].cost != "cheap" and walk[n] in n.axes and all(walk[r] == walk[n] for r in readers[n]):
            number[n] = min(number[r] for r in readers[n])


def _with_service(program: Program, kernels: list[Kernel]) -> list[Kernel]:
    """Note for each kernel which outputs need it, so that a launch nobody needs is left out."""
    needs: dict[Node, int] = {}
    for i, (_, n) in enumerate(program.outputs):
        needs[n] = needs.get(n, 0) | 1 << i
    masks: dict[Node, int] = {}
    ends = {new: 1 << (len(program.outputs) + i) for i, (_, new, _) in enumerate(program.carried)}
    serves: list[int] = []
    for kernel in reversed(kernels):
        mask = 0
        for n in kernel.stores:
            mask |= masks.get(n, 0) | needs.get(n, 0)
        if kernel.state:
            mask |= masks.get(kernel.state[0], 0) | ends.get(kernel.state[1], 0)
        for n in kernel.loads:
            masks[n] = masks.get(n, 0) | mask
        serves.append(mask)
    return [replace(k, serves=s) for k, s in zip(kernels, reversed(serves), strict=True)]


def christened(program: Program, names: Mapping[Node, str] | None = None) -> dict[Node, str]:
    """A unique name for every value of the program that is bound to one: given, by its operation, or numbered."""
    out: dict[Node, str] = {}
    taken: set[str] = set()

    def take(n: Node, label: str) -> None:
        unique, number = label, 2
        while unique in taken:
            unique, number = f"{label}{number}", number + 1
        out[n] = unique
        taken.add(unique)

    for n in program.nodes():
        if n.op == "input":
            take(n, str(n.attr("name")))
    for label, n in program.outputs:
        if n not in out and not is_leaf(n):
            take(n, label)
    for n, label in (program.names if names is None else names).items():
        if n not in out:
            take(n, label)
    for n in program.nodes():
        if n in out or is_leaf(n):
            continue
        take(n, _word(n, out))
    return out


def _word(n: Node, names: Mapping[Node, str]) -> str:
    if n.op == "inverse":
        return "E"
    if n.op == "matmul":
        x = n.args[0]
        if (x.op == "inverse" or names.get(x) == "E") and not n.attr("tx"):
            return "W" if n.axes == ("C", "K") else "U"
    return "x"


def trees(kernel: Kernel) -> int:
    """How many matrices of decayed pairs a kernel's trees form, or are given."""
    return len({n if n.op == "gram" else n.args[0] for n in kernel.nodes if n.op in TREE})


Options = tuple[int, int, int, int, int]
Table = tuple[tuple[str, dict[int, Options]], ...]


def _options(**kernels: Options | dict[int, Options]) -> Table:
    return tuple((name, x if isinstance(x, dict) else {0: x}) for name, x in kernels.items())


def options_of(kernel: Kernel, table: Table) -> Options:
    """A kernel's options in a row of the table: those for the most trees that it walks."""
    choices = dict(table)[kernel.name]
    return choices[max(n for n in choices if n <= trees(kernel))]


#: The most keys for which products take what cancels in two parts and launches hand it over in float32: beyond, the
#: forward scan fills shared memory, and a forward would take 16 % longer.
FINE_K = 64

#: (what products are made in, largest K, tokens a chunk, ((kernel, options), ...)); the first match wins. Options:
#: block of K, block of V, warps, stages, most registers (0: 255). A kernel that does not walk K takes all of it; a scan
#: has as many stages as shared memory holds, up to the number here. Where a kernel's options depend on its trees, they
#: stand by the fewest that they are for (`trees`): tiles of more trees need more registers.
CONFIGS: tuple[tuple[str, int, int, Table], ...] = (
    (
        "bfloat16",
        128,
        64,
        _options(
            prepare=(64, 64, 4, 3, 168),
            prepare_1=(128, 64, 4, 1, 0),
            scan=(0, 64, 4, 3, 0),
            reverse=(0, 64, 4, 3, 0),
            finish=(0, 128, 8, 1, 248),
            finish_1={0: (32, 64, 4, 1, 0), 2: (16, 64, 4, 1, 0), 4: (32, 64, 8, 1, 0)},
            finish_2=(32, 64, 4, 1, 0),
        ),
    ),
    (
        "bfloat16",
        256,
        32,
        _options(
            prepare=(64, 64, 4, 1, 0),
            prepare_1=(64, 64, 4, 1, 0),
            scan=(0, 64, 8, 3, 0),
            reverse=(0, 64, 8, 3, 0),
            finish=(0, 64, 8, 1, 248),
            finish_1=(64, 64, 8, 1, 0),
            finish_2=(32, 64, 4, 1, 0),
        ),
    ),
    (
        "tf32",
        128,
        64,
        _options(
            prepare=(64, 64, 4, 1, 0),
            prepare_1=(64, 64, 4, 1, 0),
            scan=(0, 32, 4, 3, 0),
            reverse=(0, 32, 4, 3, 0),
            finish=(0, 32, 8, 1, 248),
            finish_1={0: (32, 64, 4, 1, 0), 2: (16, 64, 4, 1, 0), 4: (32, 64, 4, 1, 0)},
            finish_2=(32, 64, 4, 1, 0),
        ),
    ),
    (
        "tf32",
        256,
        32,
        _options(
            prepare=(64, 32, 4, 1, 0),
            prepare_1=(64, 32, 4, 1, 0),
            scan=(0, 32, 8, 3, 0),
            reverse=(0, 32, 8, 3, 0),
            finish=(0, 32, 8, 1, 248),
            finish_1=(32, 32, 8, 1, 0),
            finish_2=(32, 32, 4, 1, 0),
        ),
    ),
    (
        "ieee",
        256,
        16,
        _options(
            prepare=(64, 32, 4, 1, 0),
            prepare_1=(64, 32, 4, 1, 0),
            scan=(0, 32, 4, 3, 0),
            reverse=(0, 32, 4, 3, 0),
            finish=(0, 32, 4, 1, 248),
            finish_1=(64, 32, 4, 1, 0),
            finish_2=(64, 32, 4, 1, 0),
        ),
    ),
)
