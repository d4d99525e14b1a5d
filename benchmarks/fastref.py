"""The float64 token recurrence, in parallel over segments of the sequence: the loops of tests/oracles.py, fast.

Every variant is one recurrence on the state h [K, V], read before the decay:

    h_t = Diag(alpha_t) h_(t-1) - a_t (d_t^T h_(t-1)) + k_t v_t^T          o_t = scale * h_t^T q_t

A loop of T tokens costs thousands of tiny launches on a GPU. Here T is cut into about sqrt(T) segments. All of them
step at once from the state 0 and from the identity, which gives what a segment makes of any state that enters it; the
states between segments follow one after the other; then all segments step at once from their true states. The
backward is the adjoint recurrence, written out, cut the same way. Nothing is divided and no decay is accumulated, so
gates of any size are safe. float64 throughout; heads go in slices, so that memory stays bounded.

`fast_oracle(name)` has the signature of `ORACLES[name]`, `reference` that of `metrics.reference`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import bench
import torch
from torch import Tensor

bench.use_checkout()

import metrics  # noqa: E402
from oracles import HEAD, SIGNATURES, clipped_gate, computing_eps, names  # noqa: E402

MEMORY = 1 << 30
"""Bytes of states that a slice of heads may keep at a time."""

SHORT = 96
"""Sequences up to this length are one segment."""


# ---------------------------------------------------------------------------------------------------------------------
# The recurrence. Inside, tokens are [steps, lanes * segments, size]: step s of every segment of every head together.


def _segments(tokens: int) -> int:
    return 1 if tokens <= SHORT else round(math.sqrt(tokens))


def _cut(x: Tensor, segments: int, padding: float = 0.0) -> Tensor:
    """[lanes, T, size] as [steps, lanes * segments, size]; the padding makes a step that changes nothing."""
    lanes, tokens, size = x.shape
    steps = -(-tokens // segments)
    x = torch.nn.functional.pad(x, (0, 0, 0, segments * steps - tokens), value=padding)
    return x.view(lanes, segments, steps, size).permute(2, 0, 1, 3).reshape(steps, lanes * segments, size)


def _join(x: Tensor, lanes: int, tokens: int) -> Tensor:
    """The inverse of `_cut`."""
    steps, _, size = x.shape
    return x.view(steps, lanes, -1, size).permute(1, 2, 0, 3).reshape(lanes, -1, size)[:, :tokens]


def _column(x: Tensor) -> Tensor:
    return x.unsqueeze(-1)


def _row(x: Tensor) -> Tensor:
    return x.unsqueeze(-2)


def _step(h: Tensor, alpha: Tensor, a: Tensor, d: Tensor) -> Tensor:
    """Diag(alpha) h - a (d^T h); with a and d swapped, its adjoint."""
    return (_column(alpha) * h).addcmul_(_column(a), _row(d) @ h, value=-1.0)


def _identity(like: Tensor, size: int) -> Tensor:
    lanes, rows = like.shape[1:]
    eye = torch.eye(rows, dtype=like.dtype, device=like.device).expand(lanes, rows, rows)
    return torch.cat([eye, like.new_zeros(lanes, rows, size)], dim=-1)


def _entering(x: dict[str, Tensor], first: Tensor) -> tuple[Tensor, Tensor]:
    """The state before each segment, [lanes * segments, K, V], and what each makes of a state, [.., K, K]."""
    lanes, size, width = first.shape
    segments = x["k"].shape[1] // lanes
    if segments == 1:
        return first, first.new_empty(0)
    both = _identity(x["k"], width)
    for alpha, a, d, k, v in zip(x["alpha"], x["a"], x["d"], x["k"], x["v"], strict=True):
        both = _step(both, alpha, a, d)
        both[..., size:].addcmul_(_column(k), _row(v))
    transition, local = both.view(lanes, segments, size, size + width).split([size, width], dim=-1)
    states = [first]
    for i in range(segments - 1):
        states.append(transition[:, i] @ states[-1] + local[:, i])
    return torch.stack(states, dim=1).flatten(0, 1), transition.contiguous()


def _leaving(x: dict[str, Tensor], transition: Tensor, last: Tensor) -> Tensor:
    """The cotangent of the state after each segment, from that of the final state."""
    lanes, size, width = last.shape
    segments = x["k"].shape[1] // lanes
    if segments == 1:
        return last
    local = last.new_zeros(lanes * segments, size, width)
    for s in range(len(x["k"]) - 1, -1, -1):
        local.addcmul_(_column(x["q"][s]), _row(x["do"][s]))
        local = _step(local, x["alpha"][s], x["d"][s], x["a"][s])
    local = local.view(lanes, segments, size, width)
    found = [last]
    for i in range(segments - 1, 0, -1):
        found.append(transition[:, i].mT @ found[-1] + local[:, i])
    return torch.stack(found[::-1], dim=1).flatten(0, 1)


def _advance(x: dict[str, Tensor], h: Tensor) -> Iterator[Tensor]:
    """The state after each step, all segments at once."""
    for alpha, a, d, k, v in zip(x["alpha"], x["a"], x["d"], x["k"], x["v"], strict=True):
        h = _step(h, alpha, a, d).addcmul_(_column(k), _row(v))
        yield h


def _forward(x: dict[str, Tensor], first: Tensor) -> tuple[Tensor, Tensor]:
    """o as [steps, lanes * segments, V], and the final state."""
    last, _ = _entering(x, first)
    outputs = []
    for q, h in zip(x["q"], _advance(x, last), strict=True):
        outputs.append((_row(q) @ h).squeeze(-2))
        last = h
    return torch.stack(outputs), last.view(len(first), -1, *last.shape[1:])[:, -1]


def _backward(x: dict[str, Tensor], first: Tensor, last: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """Cotangents of the streams, as `_cut` has them, and of the first state. x holds `do` as well."""
    entering, transition = _entering(x, first)
    states = [entering, *_advance(x, entering)]
    dh = _leaving(x, transition, last).clone()
    found: dict[str, list[Tensor]] = {key: [] for key in ("q", "k", "v", "a", "d", "alpha")}
    for s in range(len(x["k"]) - 1, -1, -1):
        q, k, v, a, d, do = (x[key][s] for key in ("q", "k", "v", "a", "d", "do"))
        before, after = states[s], states[s + 1]
        found["q"].append((after @ _column(do)).squeeze(-1))
        dh.addcmul_(_column(q), _row(do))
        dv, lost = (torch.stack([k, a], dim=-2) @ dh).unbind(-2)
        dk, da = (dh @ torch.stack([v, (_row(d) @ before).squeeze(-2)], dim=-1)).unbind(-1)
        found["k"].append(dk)
        found["v"].append(dv)
        found["a"].append(-da)
        found["d"].append(-(before @ _column(lost)).squeeze(-1))
        found["alpha"].append((before * dh).sum(-1))
        dh = (_column(x["alpha"][s]) * dh).addcmul_(_column(d), _row(lost), value=-1.0)
    return {key: torch.stack(each[::-1]) for key, each in found.items()}, dh.view(len(first), -1, *dh.shape[1:])[:, 0]


def _tokens(segments: int, q: Tensor, k: Tensor, v: Tensor, a: Tensor, d: Tensor, alpha: Tensor) -> dict[str, Tensor]:
    cut = {key: _cut(x, segments) for key, x in (("q", q), ("k", k), ("v", v), ("a", a), ("d", d))}
    return cut | {"alpha": _cut(alpha, segments, padding=1.0)}


class Recurrence(torch.autograd.Function):
    """(q, k, v, a, d, alpha, first state) [lanes, T, ..] -> o, final state; the backward steps through anew."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[Tensor, Tensor]:
        *streams, first, segments = args
        ctx.save_for_backward(*streams, first)
        ctx.segments = segments
        outputs, finals = [], []
        for part in _slices(streams[1], streams[2]):
            x = _tokens(segments, *(s[part] for s in streams))
            o, final = _forward(x, first[part])
            outputs.append(_join(o, len(first[part]), streams[0].shape[1]))
            finals.append(final)
        return torch.cat(outputs), torch.cat(finals)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor | None, ...]:
        do, dht = cotangents
        *streams, first = ctx.saved_tensors
        tokens = streams[0].shape[1]
        parts = []
        for part in _slices(streams[1], streams[2]):
            x = _tokens(ctx.segments, *(s[part] for s in streams))
            x["do"] = _cut(do[part], ctx.segments)
            grads, dfirst = _backward(x, first[part], dht[part])
            parts.append([*(_join(g, len(dfirst), tokens) for g in grads.values()), dfirst])
        return (*(torch.cat(pieces) for pieces in zip(*parts, strict=True)), None)


def _slices(k: Tensor, v: Tensor) -> Iterator[slice]:
    """Slices of the lanes whose states fit into MEMORY together."""
    lanes, tokens, size = k.shape
    each = max(1, MEMORY // (8 * (tokens + 1) * size * v.shape[2]))
    for start in range(0, lanes, each):
        yield slice(start, min(start + each, lanes))


# ---------------------------------------------------------------------------------------------------------------------
# What the variants are in it: k, v, a, d. `alpha` is exp(g), after the clip where there is one, 1 without a gate.

Streams = dict[str, Tensor]

BINDINGS: dict[str, Callable[[Streams], tuple[Tensor, Tensor, Tensor, Tensor]]] = {
    "gdn": lambda x: (x["k"], x["beta"] * x["v"], x["k"], x["alpha"] * x["beta"] * x["k"]),
    "kda": lambda x: (x["k"], x["beta"] * x["v"], x["k"], x["alpha"] * x["beta"] * x["k"]),
    "dplr": lambda x: (x["k"], x["v"], x["a"], x["alpha"] * x["b"]),
    "dplr_absorbed": lambda x: (x["k"], x["v"], x["a"], x["d"]),
    "gdn2_clipped": lambda x: (x["k"], x["eta"] * x["v"], x["j"], x["alpha"] * x["eta"] * x["k"]),
    "delta": lambda x: (x["k"], x["beta"] * x["v"], x["k"], x["beta"] * x["k"]),
    "simple_gla": lambda x: (x["k"], x["v"], torch.zeros_like(x["k"]), torch.zeros_like(x["k"])),
    "gla": lambda x: (x["k"], x["v"], torch.zeros_like(x["k"]), torch.zeros_like(x["k"])),
    "gdn2": lambda x: (x["k"], x["w"] * x["v"], x["k"], x["alpha"] * x["e"] * x["k"]),
    "rwkv7": lambda x: (x["k"], x["v"], x["b"], -x["a"]),
    "comba": lambda x: (x["k"], x["beta"] * x["v"], x["k"], x["alpha"] * x["beta"] * x["p"]),
}


def _prepare(x: Tensor, shape: str, value_heads: int) -> Tensor:
    """float64, HV heads, a trailing axis for numbers a head."""
    x = x.double()
    if "HV" not in shape.split():
        x = x.repeat_interleave(value_heads // x.shape[2], dim=2)
    return x.unsqueeze(-1) if shape == HEAD else x


def _lanes(x: Tensor, size: int) -> Tensor:
    """[B, T, HV, size or 1] as [B * HV, T, size]."""
    return x.expand(*x.shape[:3], size).transpose(1, 2).flatten(0, 1).contiguous()


def fast_oracle(name: str, segments: int | None = None) -> Callable[..., tuple[Tensor, Tensor]]:
    """`ORACLES[name]`, in parallel over `segments`, about sqrt(T) unless given."""

    def oracle(
        *streams: Tensor,
        scale: float | None = None,
        initial_state: Tensor | None = None,
        eps: float | None = None,
    ) -> tuple[Tensor, Tensor]:
        value = streams[names(name).index("v")]
        batch, tokens, value_heads, width = value.shape
        x = {n: _prepare(s, shape, value_heads) for (n, shape), s in zip(SIGNATURES[name], streams, strict=True)}
        size = x["q"].shape[-1]
        if name == "gdn2_clipped":
            eps = computing_eps(value.dtype) if eps is None else eps
            x["g"] = clipped_gate(x["g"], x["eta"] * x["k"], x["j"], eps)
        x["alpha"] = x["g"].exp() if "g" in x else torch.ones_like(x["k"][..., :1])
        k, v, a, d = BINDINGS[name](x)
        q = x["q"] * (size**-0.5 if scale is None else scale)
        lanes = [_lanes(s, n) for s, n in ((q, size), (k, size), (v, width), (a, size), (d, size), (x["alpha"], size))]
        if initial_state is None:
            first = q.new_zeros(batch * value_heads, size, width)
        else:
            first = initial_state.double().flatten(0, 1)
        o, final = Recurrence.apply(*lanes, first, segments or _segments(tokens))
        o = o.view(batch, value_heads, tokens, width).transpose(1, 2)
        return o, final.view(batch, value_heads, size, width)

    return oracle


def reference(name: str, streams, h0, do, dht, scale=None, segments: int | None = None) -> metrics.Result:
    """The float64 recurrence, outputs and gradients, on the inputs as they were rounded."""
    exact = [x.detach().double().requires_grad_() for x in streams]
    state = None if h0 is None else h0.detach().double().requires_grad_()
    do, dht = (None if x is None else x.double() for x in (do, dht))
    eps = computing_eps(streams[0].dtype)
    return metrics.collect(fast_oracle(name, segments), name, exact, state, do, dht, scale, eps=eps)
