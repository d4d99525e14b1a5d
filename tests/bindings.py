"""Bindings drawn at random, a value for any binding, and the token loop of any binding: independent of the compiler.

A drawn binding is made of words of the binding language only, every expression kept within about one in size, so that
the recurrence stays tame. What the compiler should find in it is known from how it was drawn.

`value_of` computes an expression on whole sequences with its own table of operations; `reference` runs the master
recurrence a token at a time in float64. Numbers a head have a trailing axis of size 1, so that all broadcast alike.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import metrics
import torch
import torch.nn.functional as F
from torch import Tensor

from dplrgen import Variant
from dplrgen.ir import Node, const, dot, exp, gate, key, log, minimum, norm, safe_div, sigmoid, sqrt, topological, value

KEYS = [key(n) for n in ("k", "a", "d", "j", "p")]
CHANNEL_GATES = [gate("e", "K"), gate("f", "K")]
HEAD_GATES = [gate("beta"), gate("eta")]
VALUE_GATES = [gate("w", "V")]
VALUES = [value("v"), value("u")]
Q, LOG_CHANNEL, LOG_HEAD = key("q"), gate("g", "K"), gate("g_head")

#: Rules whose firing is known beforehand.
FOLDS = frozenset({"absorb-solve", "merge-products", "head-decay", "no-decay", "no-erase", "absorb-gate", "row-scale"})

ERASE = ("a is k", "free", "absorbed", "absorbed, a is k", "nothing")
DECAY = ("channel", "head", "channel", "head", "one", "number")


# The value of an expression


def _safe_div(x: Tensor, y: Tensor) -> Tensor:
    nowhere = y == 0
    return torch.where(nowhere, 0.0, x / torch.where(nowhere, 1.0, y))


def _root(x: Tensor) -> Tensor:
    inside = x > 0
    return torch.where(inside, torch.where(inside, x, 1.0).sqrt(), 0.0)


#: Tests that add an operation to the language add its meaning here.
MEANING: dict[str, Callable[..., Tensor]] = {
    "add": lambda x, y: x + y,
    "mul": lambda x, y: x * y,
    "neg": lambda x: -x,
    "div": lambda x, y: x / y,
    "safe_div": _safe_div,
    "exp": torch.exp,
    "log": torch.log,
    "sqrt": _root,
    "sigmoid": torch.sigmoid,
    "minimum": torch.minimum,
    "sum": lambda x: x.sum(-1, keepdim=True),
}


def value_of(n: Node, inputs: Mapping[str, Tensor], known: dict[Node, Tensor]) -> Tensor:
    """The value of a token-level expression for every token and head: `[B, T, HV, K or V or 1]`."""
    if n not in known:
        if n.op == "input":
            known[n] = inputs[n.attr("name")]
        elif n.op == "const":
            known[n] = torch.tensor(n.attr("value"), dtype=torch.float64)
        else:
            known[n] = MEANING[n.op](*(value_of(a, inputs, known) for a in n.args))
    return known[n]


# The token loop


def token_loop(variant: Variant, streams: Sequence[Tensor], h0: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """The master recurrence of a binding in float64: `o_t = scale h_t^T q_t` with `h = Diag(alpha) h`, then
    `h = h - a (h^T b)^T + k v^T`."""
    batch, heads, key_size, value_size = h0.shape
    inputs = {}
    for n, x in zip(variant.inputs, streams, strict=True):
        x = x.double().repeat_interleave(heads // x.shape[2], dim=2)
        inputs[n.attr("name")] = x if n.axes else x.unsqueeze(-1)
    known: dict[Node, Tensor] = {}
    tokens = streams[0].shape[1]

    def rows(stream: str, size: int) -> tuple[Tensor, ...]:
        x = value_of(variant.streams()[stream], inputs, known)
        return x.expand(batch, tokens, heads, size).unbind(1)

    q, decay, a, b, k = (rows(s, key_size) for s in ("q", "decay", "a", "b", "k"))
    v, h, out = rows("v", value_size), h0.double(), []
    for t in range(tokens):
        h = decay[t][..., None] * h
        erased = torch.einsum("nhk,nhkv->nhv", b[t], h)
        h = h - torch.einsum("nhk,nhv->nhkv", a[t], erased) + torch.einsum("nhk,nhv->nhkv", k[t], v[t])
        out.append(scale * torch.einsum("nhk,nhkv->nhv", q[t], h))
    return torch.stack(out, 1), h


@dataclass(frozen=True)
class Sizes:
    B: int
    T: int
    H: int
    HV: int
    K: int
    V: int


@dataclass(frozen=True)
class Inputs:
    """What a call takes and its cotangents; streams and state are leaves that require grad."""

    streams: list[Tensor]
    h0: Tensor
    do: Tensor
    dht: Tensor
    scale: float


def make_inputs(variant: Variant, sizes: Sizes, dtype: torch.dtype = torch.float64, seed: int = 0) -> Inputs:
    """Inputs by role: unit keys, values in (-1, 1), log-decays in (-1.5, 0), other gates in (0.2, 0.9)."""
    generator = torch.Generator().manual_seed(seed)
    size = vars(sizes)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(shape, generator=generator, dtype=torch.float64)

    streams = []
    for n in variant.inputs:
        shape = [sizes.B, sizes.T, size[n.attr("heads")], *(size[axis] for axis in n.axes)]
        role, name = n.attr("role"), n.attr("name")
        if role == "key":
            x = F.normalize(torch.randn(shape, generator=generator, dtype=torch.float64), dim=-1)
        elif role == "value":
            x = 2.0 * uniform(*shape) - 1.0
        else:
            x = -1.5 * uniform(*shape) if name.startswith("g") else 0.2 + 0.7 * uniform(*shape)
        streams.append(x.to(dtype).requires_grad_())
    state = (sizes.B, sizes.HV, sizes.K, sizes.V)
    h0 = torch.randn(state, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    do = torch.randn((sizes.B, sizes.T, sizes.HV, sizes.V), generator=generator, dtype=torch.float64).to(dtype)
    dht = torch.randn(state, generator=generator, dtype=torch.float64).to(dtype)
    return Inputs(streams, h0, do, dht, scale=0.7)


def result_of(variant: Variant, o: Tensor, ht: Tensor, grads: Sequence[Tensor]) -> metrics.Result:
    """Outputs and gradients by name."""
    keys = ["o", "ht", *(f"d{n.attr('name')}" for n in variant.inputs), "dh0"]
    return dict(zip(keys, (o.detach(), ht.detach(), *grads), strict=True))


def reference(variant: Variant, given: Inputs) -> metrics.Result:
    """Values and gradients of the token loop on the inputs as they were rounded."""
    leaves = [x.detach().double().requires_grad_() for x in (*given.streams, given.h0)]
    o, ht = token_loop(variant, leaves[:-1], leaves[-1], given.scale)
    return result_of(variant, o, ht, metrics.backward_of(o, ht, given.do.double(), given.dht.double(), leaves))


def run(op: Callable[..., tuple[Tensor, Tensor]], variant: Variant, given: Inputs) -> metrics.Result:
    """Values and gradients of an operator."""
    o, ht = op(*given.streams, scale=given.scale, initial_state=given.h0, output_final_state=True)
    leaves = [*given.streams, given.h0]
    return result_of(variant, o, ht, metrics.backward_of(o, ht, given.do, given.dht, leaves))


def differences(got: metrics.Result, want: metrics.Result, limit: float) -> dict[str, float]:
    """Which tensors are further from the reference than the limit, relative to its size, or have another shape."""
    figures = {
        name: metrics.rr(got[name], ref) if got[name].shape == ref.shape else float("inf") for name, ref in want.items()
    }
    return {name: figure for name, figure in figures.items() if not figure <= limit}


# Drawing


class Drawer:
    """Draws expressions whose elements stay within about one."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)

    def pick(self, forms: Sequence[Callable[[], Node]]) -> Node:
        return self.rng.choice(forms)()

    def number(self) -> float:
        return self.rng.choice((0.25, 1 / 3, 0.5, 0.7, -0.6))

    def scalar(self, depth: int) -> Node:
        """One number a head."""
        if depth <= 0:
            return self.rng.choice(HEAD_GATES)

        def deeper() -> Node:
            return self.scalar(depth - 1)

        def vector() -> Node:
            return self.vector(depth - 1)

        return self.pick(
            [
                lambda: deeper() * deeper(),
                lambda: 0.5 * (deeper() + deeper()),
                lambda: 1.0 - deeper(),
                lambda: sigmoid(deeper()),
                lambda: exp(-_square(deeper())),
                lambda: log(1.5 + _square(deeper())),
                lambda: 0.5 * log(self.rng.choice(HEAD_GATES)),
                lambda: sqrt(self.rng.choice(HEAD_GATES)),
                lambda: sqrt(0.1 + _square(deeper())),
                lambda: minimum(deeper(), deeper()),
                lambda: dot(self.rng.choice(KEYS), self.rng.choice(KEYS)),
                lambda: dot(self.rng.choice(KEYS), vector()),
                lambda: 0.2 * norm(vector() + self.rng.choice(KEYS)),
                lambda: safe_div(dot(self.rng.choice(KEYS), vector()), 1.0 + norm(vector())),
                lambda: 0.3 / (0.5 + _square(deeper())),
            ]
        )

    def vector(self, depth: int) -> Node:
        """One number a key channel."""
        if depth <= 0:
            return self.rng.choice(KEYS + CHANNEL_GATES[: self.rng.randint(0, 2)])

        def deeper() -> Node:
            return self.vector(depth - 1)

        return self.pick(
            [
                lambda: deeper() * deeper(),
                lambda: 0.5 * (deeper() + deeper()),
                lambda: 0.5 * (deeper() - deeper()),
                lambda: self.scalar(depth - 1) * deeper(),
                lambda: -deeper(),
                lambda: self.number() * deeper(),
                lambda: deeper() + 0.3 * self.scalar(depth - 1),
                lambda: sigmoid(deeper()),
                lambda: exp(-_square(deeper())),
                lambda: _unit(self.rng.choice(KEYS) + 0.5 * deeper()),
                lambda: minimum(deeper(), deeper()),
                lambda: minimum(deeper(), 0.5 * self.scalar(depth - 1)),
                lambda: sqrt(0.1 + _square(deeper())),
                lambda: log(self.rng.choice(CHANNEL_GATES)),
                lambda: log(0.5 + _square(deeper())),
                lambda: deeper() / (0.5 + _square(deeper())),
                lambda: self.rng.choice(KEYS) / norm(self.rng.choice(KEYS)),
            ]
        )

    def values(self, depth: int) -> Node:
        """One number a value channel."""
        if depth <= 0:
            return self.rng.choice(VALUES + VALUE_GATES)

        def deeper() -> Node:
            return self.values(depth - 1)

        return self.pick(
            [
                lambda: deeper() * deeper(),
                lambda: 0.5 * (deeper() - deeper()),
                lambda: self.scalar(depth) * deeper(),
                lambda: self.rng.choice(VALUE_GATES) * deeper(),
                lambda: deeper() + 0.3 * self.scalar(depth - 1),
                lambda: sigmoid(deeper()),
                lambda: minimum(deeper(), deeper()),
                lambda: deeper() * dot(KEYS[0], KEYS[0]),
                lambda: log(self.rng.choice(VALUE_GATES)) * deeper(),
            ]
        )

    def decay(self, kind: str) -> Node:
        """alpha, in (0, 1)."""
        if kind == "one":
            return const(1)
        if kind == "number":
            return const(self.rng.choice((0.9, 1 / 3, 31 / 32)))
        head = kind == "head"
        log_gate = LOG_HEAD if head else LOG_CHANNEL
        open_gate = self.rng.choice(HEAD_GATES if head else CHANNEL_GATES)

        def drawn() -> Node:
            return self.scalar(2) if head else self.vector(2)

        return self.pick(
            [
                lambda: exp(log_gate),
                lambda: exp(log_gate * sigmoid(drawn())),
                lambda: exp(-_square(drawn())),
                lambda: exp(-sigmoid(drawn())),
                lambda: exp(minimum(log_gate, -0.1 - _square(drawn()))),
                lambda: exp(0.5 * log(open_gate)),
                lambda: sigmoid(1.0 + drawn()),
                lambda: exp(log_gate) * open_gate,
                lambda: 1.0 - 0.5 * sigmoid(drawn()),
                lambda: open_gate,
            ]
        )

    def log_decay(self, kind: str) -> Node:
        """log alpha, where alpha has to be an exponential."""
        log_gate = LOG_HEAD if kind == "head" else LOG_CHANNEL
        drawn = self.scalar(1) if kind == "head" else self.vector(1)
        return self.pick([lambda: log_gate, lambda: -sigmoid(drawn), lambda: minimum(log_gate, -0.1 - _square(drawn))])

    def key_stream(self) -> Node:
        """A write or erase direction: an input, or a drawn vector of unit length."""
        return self.pick([lambda: self.rng.choice(KEYS), lambda: _unit(self.rng.choice(KEYS) + 0.5 * self.vector(2))])

    def erase(self) -> Node:
        """b, small beside a direction of unit length."""
        scale = self.rng.choice((HEAD_GATES[0], 0.5 * HEAD_GATES[1], const(0.4), CHANNEL_GATES[0], self.scalar(2)))
        return 0.5 * scale * self.key_stream() if scale.op != "const" else 0.4 * self.key_stream()

    def query(self) -> Node:
        return self.pick([lambda: Q, lambda: self.scalar(1) * Q, lambda: _unit(Q), lambda: Q + 0.5 * self.vector(2)])

    def value_stream(self) -> Node:
        v = VALUES[0]
        return self.pick(
            [
                lambda: v,
                lambda: self.scalar(2) * v,
                lambda: VALUE_GATES[0] * v,
                lambda: v * dot(KEYS[0], KEYS[0]),
                lambda: v * (0.3 + self.values(2)),
                lambda: 0.5 * (v + self.values(3)),
            ]
        )


def _square(x: Node) -> Node:
    return x * x


def _unit(x: Node) -> Node:
    return safe_div(x, norm(x))


def scalar_factor(n: Node) -> bool:
    """Whether a product has a factor that is one number a token and head, literals aside."""
    if n.op in ("mul", "neg"):
        return any(scalar_factor(a) for a in n.args)
    return not n.axes and n.op != "const"


@dataclass(frozen=True)
class Drawn:
    """A binding, what the compiler should find in it, and the tile products that should remain."""

    variant: Variant
    kind: str
    folds: frozenset[str]
    products: int


def draw(seed: int) -> Drawn:
    """The binding of a seed. The kinds of erase term and of decay go round, so that each pair comes up."""
    drawer = Drawer(seed)
    erase, decay_kind = ERASE[seed % len(ERASE)], DECAY[seed // len(ERASE) % len(DECAY)]
    absorbed, tied = erase.startswith("absorbed"), erase in ("a is k", "absorbed, a is k", "nothing")
    if absorbed and decay_kind in ("one", "number"):
        decay_kind = "head"
    k = drawer.key_stream()
    a = k
    while not tied and a is k:
        a = drawer.key_stream()
    top = const(0) if erase == "nothing" else drawer.erase()
    decay, b = drawer.decay(decay_kind), top
    if absorbed:
        decay = exp(drawer.log_decay(decay_kind))
        b = drawer.rng.choice((top / decay, HEAD_GATES[1] * (top / decay), -(top / decay)))
    rows = scalar_factor(drawn_q := drawer.query()) or (erase != "nothing" and _scaled(b))
    folds = {
        "absorb-solve": tied and erase != "nothing",
        "merge-products": tied and erase != "nothing",
        "no-erase": erase == "nothing",
        "absorb-gate": absorbed,
        "head-decay": not decay.axes and decay_kind != "one",
        "no-decay": decay_kind == "one",
        "row-scale": rows,
    }
    streams = {"decay": decay, "a": a, "b": b, "k": k, "v": drawer.value_stream(), "q": drawn_q}
    leaves = [n for n in topological(streams.values()) if n.op == "input"]
    drawer.rng.shuffle(leaves)
    variant = Variant(name=f"random_{seed}", inputs=tuple(leaves), **streams)
    products = 4 if erase == "nothing" else 8 if tied else 13
    kind = f"erase {erase}, decay {decay_kind}"
    return Drawn(variant, kind, frozenset(f for f, fires in folds.items() if fires), products)


def _scaled(b: Node) -> bool:
    """`scalar_factor` with a quotient by the decay looked through."""
    if b.op in ("mul", "neg"):
        return any(_scaled(x) for x in b.args)
    return scalar_factor(b.args[0]) if b.op == "div" and b.axes else scalar_factor(b)
