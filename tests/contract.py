"""What every op promises beyond being right on ordinary inputs, as checks that run on any device.

A check takes a variant's name and a place to run and gives what it found wrong, a line each. Inputs follow the law of
tests/inputs.py unless the check is about other ones; the reference is the float64 loop.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import metrics
import torch
from inputs import REGIMES, has_gate, make
from oracles import SIGNATURES, names
from torch import Tensor

from dplrgen import ops

Reference = Callable[..., metrics.Result]


@dataclass(frozen=True)
class Place:
    """Where a check runs, in which dtype, at which head sizes, and what it is judged by."""

    device: str = "cpu"
    dtype: torch.dtype = torch.float32
    K: int = 10
    V: int = 14
    reference: Reference = metrics.reference

    @property
    def gate_dtype(self) -> torch.dtype | None:
        return torch.float32 if self.dtype == torch.float16 else None

    @property
    def rounds(self) -> bool:
        """Whether operands of products have fewer digits than float32: on the CPU they do not."""
        return self.device != "cpu" and self.dtype != torch.float32

    def length(self, tokens: int) -> int:
        """So many tokens on a GPU, where a chunk has 64; on the CPU, where it has 32 and the loop is slow, fewer."""
        return tokens if self.device != "cpu" else min(tokens, 70)

    def inputs(
        self, name: str, T: int, B: int = 1, H: int = 2, HV: int = 4, regime: str = "mild", seed: int = 0, **more
    ):
        sizes = (B, T, H, HV, self.K, self.V)
        options = {"gate_dtype": self.gate_dtype, "device": self.device, **more}
        return make(name, *sizes, self.dtype, regime=regime if has_gate(name) else "zero", seed=seed, **options)


def of(name: str) -> Callable[..., tuple[Tensor, Tensor | None]]:
    return getattr(ops, name)


def run(name: str, streams, h0, do, dht, **options) -> metrics.Result:
    return metrics.collect(of(name), name, streams, h0, do, dht, output_final_state=True, **options)


def judged(name: str, place: Place, label: str, given) -> list[str]:
    """What is wrong with the op on these inputs."""
    streams, h0, do, dht = given
    got = run(name, streams, h0, do, dht)
    ref = place.reference(name, streams, h0, do, dht)
    return [f"{label}: {line}" for line in metrics.check(name, got, ref, place.dtype, streams)]


def differing(label: str, got: metrics.Result, want: metrics.Result) -> list[str]:
    """Results that are not the same bits."""
    return [f"{label}: {key} differs" for key in want if not torch.equal(got[key], want[key])]


def leaves(streams: Sequence[Tensor], change: Callable[[Tensor], Tensor]) -> list[Tensor]:
    return [change(x.detach()).requires_grad_() for x in streams]


@torch.no_grad()
def filled(name: str, given, **values: Tensor | float):
    """The inputs with the named streams' values replaced."""
    for stream, value in values.items():
        x = given[0][names(name).index(stream)]
        x.copy_(torch.as_tensor(value, dtype=torch.float64).to(x.device).broadcast_to(x.shape))
    return given


# ---------------------------------------------------------------------------------------------------------------------
# Numbers


def strong_gates(name: str, place: Place) -> list[str]:
    """Constant decays around and beyond what a factored form survives, and mixtures of none and all."""
    if not asks(strong_gates, name):
        return []
    return [line for label, given in strong_gate_calls(name, place) for line in judged(name, place, label, given)]


def strong_gate_calls(name: str, place: Place) -> Iterator[tuple[str, tuple]]:
    """(what the gates are, inputs)."""
    T = place.length(130)
    generator = torch.Generator().manual_seed(1)
    shape = place.inputs(name, T)[0][names(name).index("g")].shape
    lot = torch.rand(shape, generator=generator, dtype=torch.float64)
    token = torch.arange(T).view(-1, *[1] * (len(shape) - 2))
    gates: dict[str, Tensor | float] = {str(-x): -x for x in (5.4, 5.6, 5.9, 6.0, 8.0, 20.0)}
    gates |= {"0 or -50": torch.where(lot < 0.5, 0.0, -50.0), "0 or -1": torch.where(lot < 0.5, 0.0, -1.0)}
    gates["-20 first of 16"] = torch.where(token % 16 == 0, -20.0, -0.1)
    gates["-1e4 at times"] = torch.where(lot < 0.05, -1e4, -0.1)
    for label, g in gates.items():
        # The strong law of the inputs: an erase vector that the decay has not made huge.
        yield f"g = {label}", filled(name, place.inputs(name, T, regime="strong", seed=2), g=g)


def growing_gates(name: str, place: Place) -> list[str]:
    """g > 0 follows the formula while a chunk's sum stays small."""
    if not asks(growing_gates, name):
        return []
    given = filled(name, place.inputs(name, 70, regime="weak", seed=3), g=0.1)
    return judged(name, place, "g = 0.1", given)


def no_gate(name: str, place: Place) -> list[str]:
    """g = 0: masks go by index, not by the exponent."""
    failures = []
    for T in (7, 50, 64, 130) if place.device != "cpu" else (7, 32, 70):
        failures += judged(name, place, f"g = 0, T = {T}", place.inputs(name, T, regime="zero", seed=4))
    return failures


def hard_key_calls(name: str, place: Place) -> Iterator[tuple[str, tuple]]:
    """Equal keys, beta up to 2, keys that are not of unit length, rows of zeros: (label, inputs)."""
    generator = torch.Generator().manual_seed(5)
    least = -0.01 if name == "gdn2_clipped" else 0.0  # at 0 its clip is a tie, which rounding decides

    def given(T: int, beta: Tensor | float, length: float, g: float, equal: bool):
        drawn = place.inputs(name, T, regime="weak", seed=6)
        shape = (1, 1 if equal else T, 2, place.K)
        k = length * torch.nn.functional.normalize(torch.randn(shape, generator=generator).double(), dim=-1)
        return filled(name, drawn, **_erasing(name, k, beta, min(g, least)))

    T = place.length(150)
    wide = torch.rand(1, T, 4, generator=generator, dtype=torch.float64) * 2
    for tokens in (64, 150, 256) if place.device != "cpu" else (T,):
        yield f"keys equal, beta 1, T = {tokens}", given(tokens, 1.0, 1.0, 0.0, True)
        yield f"keys equal, beta 1.99, T = {tokens}", given(tokens, 1.99, 1.0, 0.0, True)
    if place.dtype == torch.float32:
        yield "beta 2, T = 1024", given(1024, 2.0, 1.0, 0.0, False)
    yield "beta to 2", given(T, wide, 1.0, -0.01, False)
    yield "keys of 1.4", given(T, 1.0, 1.4, 0.0, False)
    if has_gate(name):
        yield "keys of 2, g = -3", given(T, 1.0, 2.0, -3.0, False)
    rows = given(T, 0.5, 1.0, -0.1, False)
    with torch.no_grad():
        for x in rows[0]:
            x[:, ::7] = 0
    yield "rows of zeros", rows


def _erasing(name: str, k: Tensor, beta: Tensor | float, g: float) -> dict[str, Tensor | float]:
    """The values of a variant's streams with which a token decays by exp(g), if it can, and erases I - beta k k^T."""
    strength = torch.as_tensor(beta, dtype=torch.float64)
    channels = strength[..., None]
    of_key_heads = channels[:, :, :: strength.shape[2] // k.shape[2]] if strength.dim() else strength
    b, decay = of_key_heads * k, math.exp(g)
    own: dict[str, dict[str, Tensor | float]] = {
        "comba": {"p": k, "beta": strength},
        "gdn2": {"e": channels, "w": channels},
        "gdn2_clipped": {"j": k, "eta": strength},
        "dplr": {"a": k, "b": b},
        "dplr_absorbed": {"a": k, "d": decay * b},
        "rwkv7": {"a": -decay * b, "b": k},
    }
    return {"k": k, **own.get(name, {"beta": strength}), **({"g": g} if has_gate(name) else {})}


def hard_keys(name: str, place: Place) -> list[str]:
    """Equal keys, beta up to 2, keys that are not of unit length, rows of zeros."""
    if not asks(hard_keys, name):
        return []
    return [line for label, given in hard_key_calls(name, place) for line in judged(name, place, label, given)]


def wide_range(name: str, place: Place) -> list[str]:
    """A state beyond float16's largest number, and a cotangent below its least: none is lost on the way."""
    streams, h0, do, dht = place.inputs(name, 64, seed=7)
    if has_gate(name):
        filled(name, (streams,), g=-0.1)
    with torch.no_grad():
        h0[..., 0, 0] = 65536.0
        do.zero_()
        dht.fill_(2.0**-25)
    # At such an h0 the output's own dtype is the limit, so the states alone are judged.
    got, ref = run(name, streams, h0, do, dht), place.reference(name, streams, h0, do, dht)
    figures = {k: metrics.rr(got[k], ref[k]) for k in ("ht", "dh0")}
    return [f"wide range: {k} rr {x:.1e}" for k, x in figures.items() if not x <= metrics.bound(k, place.dtype)]


def additive_cotangents(name: str, place: Place) -> list[str]:
    """The gradient of <o, do> + <ht, dht> is the sum of those of its parts, and each part is right alone."""
    streams, h0, do, dht = place.inputs(name, 65, seed=8)
    nothing, still = torch.zeros_like(do), torch.zeros_like(dht)
    failures = judged(name, place, "do = 0", (streams, h0, nothing, dht))
    failures += judged(name, place, "dht = 0", (streams, h0, do, still))
    if place.dtype == torch.float32:
        both, first, second = (run(name, streams, h0, *c) for c in ((do, dht), (nothing, dht), (do, still)))
        sums = {k: first[k] + second[k] for k in both if k not in ("o", "ht")}
        failures += [f"additive: {k} rr {x:.1e}" for k in sums if (x := metrics.rr(sums[k], both[k])) > 1e-4]
    return failures


# ---------------------------------------------------------------------------------------------------------------------
# Sizes


def every_tail(name: str, place: Place) -> list[str]:
    """Forward and backward at each length; a state comes out whatever the length."""
    failures: list[str] = []
    lengths = (
        (*range(1, 9), *range(60, 71), *range(126, 131)) if place.device != "cpu" else (1, 2, 5, 31, 32, 33, 64, 69)
    )
    for T in lengths:
        given = place.inputs(name, T, seed=9, state=T % 2 == 0)
        # A single head's inner product may cancel where a head is one token: outputs are judged there, as a whole.
        found = judged(name, place, f"T = {T}", given)
        failures += [x for x in found if not place.rounds or T >= 16 or "(batch, head" not in x]
    return failures


def every_size(name: str, place: Place) -> list[str]:
    """The place's head sizes, two chunks and a tail."""
    return judged(name, place, f"K = {place.K}, V = {place.V}", place.inputs(name, place.length(130), seed=21))


def nothing_at_all(name: str, place: Place) -> list[str]:
    """T = 0: the state is kept and its cotangent passed on; B = 0: results without rows."""
    streams, h0, do, dht = place.inputs(name, 0)
    got = run(name, streams, h0, do, dht)
    failures = [] if torch.equal(got["ht"], h0) and torch.equal(got["dh0"], dht) else ["T = 0: the state is not kept"]
    o, ht = of(name)(*streams, output_final_state=True)
    failures += [] if ht is not None and (ht == 0).all() and o.shape == do.shape else ["T = 0: a state from nowhere"]
    streams, h0, do, dht = place.inputs(name, 5, B=0)
    got = run(name, streams, h0, do, dht)
    given = {"o": do, "ht": dht, **{f"d{n}": x for n, x in zip(names(name), streams, strict=True)}, "dh0": h0}
    return failures + [f"B = 0: {k} {list(got[k].shape)}" for k, x in given.items() if got[k].shape != x.shape]


def group_sums(name: str, place: Place) -> list[str]:
    """HV > H: keys serve a group of value heads, and their gradients are summed over it."""
    failures = []
    for HV in (2, 4, 8):
        failures += judged(name, place, f"HV = {HV}", place.inputs(name, 37, HV=HV, seed=10))
    return failures


# ---------------------------------------------------------------------------------------------------------------------
# Independence


def repeats(name: str, place: Place) -> list[str]:
    """Two runs give the same bits."""
    given = place.inputs(name, 130, B=2, seed=11)
    return differing("again", run(name, *given), run(name, *given))


def rows_alone(name: str, place: Place) -> list[str]:
    """A row of a batch is what it is alone, to the bit; so it is beside NaN."""
    streams, h0, do, dht = place.inputs(name, 77, B=3, seed=12)
    whole, failures = run(name, streams, h0, do, dht), []
    for rows in (slice(0, 1), slice(1, 3)):
        part = run(
            name,
            leaves(streams, lambda x, r=rows: x[r].clone()),
            *(x[rows].detach().requires_grad_() for x in (h0, do, dht)),
        )
        failures += differing(
            f"rows {rows.start} to {rows.stop - 1} alone", {k: x[rows] for k, x in whole.items()}, part
        )

    def poisoned(x: Tensor) -> Tensor:
        x = x.detach().clone()
        x[1:] = float("nan")
        return x.requires_grad_()

    beside = run(name, [poisoned(x) for x in streams], *(poisoned(x) for x in (h0, do, dht)))
    first = {k: x[:1] for k, x in whole.items()}
    return failures + differing("beside NaN", {k: x[:1] for k, x in beside.items()}, first)


def causal(name: str, place: Place) -> list[str]:
    """Other tokens after t change no bit of the output up to t."""
    T, failures = place.length(150), []
    streams, h0, *_ = place.inputs(name, T, seed=13)
    others, *_ = place.inputs(name, T, seed=14, regime="strong")
    with torch.no_grad():
        want, _ = of(name)(*streams, initial_state=h0)
        for t in (t for t in (1, 2, 15, 16, 17, 31, 32, 40, 63, 64, 65, 100, 149) if t < T):
            mixed = [torch.cat((x[:, :t], y[:, t:]), 1) for x, y in zip(streams, others, strict=True)]
            o, _ = of(name)(*mixed, initial_state=h0)
            if not torch.equal(o[:, :t], want[:, :t]):
                failures.append(f"causal: tokens from {t} on change the output before")
    return failures


# ---------------------------------------------------------------------------------------------------------------------
# States


def hand_off(name: str, place: Place) -> list[str]:
    """A sequence cut anywhere, the state passed on, is the sequence whole: forward, and backward through the state."""
    T, splits = (230, (1, 63, 64, 65, 128)) if place.device != "cpu" else (80, (1, 32, 45))
    streams, h0, do, dht = place.inputs(name, T, seed=15)
    ref, failures = place.reference(name, streams, h0, do, dht), []
    for cut in splits:

        def two(*whole: Tensor, initial_state: Tensor, cut: int = cut, **_: object) -> tuple[Tensor, Tensor]:
            first, state = of(name)(*(x[:, :cut] for x in whole), initial_state=initial_state, output_final_state=True)
            second, end = of(name)(*(x[:, cut:] for x in whole), initial_state=state, output_final_state=True)
            return torch.cat((first, second), 1), end

        got = metrics.collect(two, name, streams, h0, do, dht)
        failures += [f"cut at {cut}: {x}" for x in metrics.check(name, got, ref, place.dtype, streams)]
        if got["ht"].dtype != torch.float32:
            failures.append(f"cut at {cut}: the state is {got['ht'].dtype}")
    return failures


def steps(name: str, place: Place, T: int = 100) -> list[str]:
    """The token step follows the chunked op, in place and out of place, slot by slot."""
    streams, h0, *_ = place.inputs(name, T, B=3, seed=16)
    step, failures = getattr(ops, f"{name}_step"), []
    with torch.no_grad():
        want, ht = of(name)(*streams, initial_state=h0, output_final_state=True)
        pool = torch.full((7, *h0.shape[1:]), 3.0, device=place.device)
        slots = torch.tensor([6, 0, 3], device=place.device, dtype=torch.int32)
        pool[slots.long()] = h0
        state, rows = h0.detach().clone(), []
        versions = state._version, pool._version
        for t in range(T):
            token = [x[:, t] for x in streams]
            o, new = step(*token, state)
            same, _ = step(*token, state, inplace=True)
            pooled, _ = step(*token, pool, inplace=True, state_indices=slots)
            if not (torch.equal(o, same) and torch.equal(new, state) and torch.equal(o, pooled)):
                failures.append(f"step {t}: out of place, in place and by slot differ")
                break
            rows.append(o)
        if not (state._version > versions[0] and pool._version > versions[1]):
            failures.append("steps: autograd is not told that a state was written")
        if not torch.equal(pool[slots.long()], state) or (pool[[1, 2, 4, 5]] != 3.0).any():
            failures.append("steps: the pool is not what the slots make it")
        limit = metrics.bound("o", place.dtype)
        figures = {"o": metrics.rr(torch.stack(rows, 1), want.double()), "state": metrics.rr(state, ht.double())}
    return failures + [f"steps: {k} rr {x:.1e} to the chunked op" for k, x in figures.items() if not x < limit]


# ---------------------------------------------------------------------------------------------------------------------
# Layouts


def scattered(x: Tensor) -> Tensor:
    """The same values in a wider tensor, heads before tokens, NaN around them."""
    wide = x.detach().new_full((x.shape[2], x.shape[0], x.shape[1] + 3, *(n + 2 for n in x.shape[3:])), float("nan"))
    view = wide.permute(1, 2, 0, *range(3, x.dim()))[:, 2:-1]
    view = view if x.dim() == 3 else view[..., 1:-1]
    return view.copy_(x.detach())


def channels_apart(x: Tensor) -> Tensor:
    """The same values, neighbours in the last axis two apart."""
    return torch.stack((x.detach(), torch.full_like(x, float("nan"))), -1)[..., 0]


def head_first(x: Tensor) -> Tensor:
    return x.detach().transpose(1, 2).contiguous().transpose(1, 2)


def tokens_last(x: Tensor) -> Tensor:
    return x.detach().movedim(1, -1).contiguous().movedim(-1, 1)


def aside(x: Tensor) -> Tensor:
    """The same values, contiguous, one element beyond where memory is aligned."""
    flat = torch.full((x.numel() + 1,), float("nan"), dtype=x.dtype, device=x.device)
    return flat[1:].view(x.shape).copy_(x.detach())


LAYOUTS = {
    "scattered": scattered,
    "channels apart": channels_apart,
    "head first": head_first,
    "tokens last": tokens_last,
    "aside": aside,
}


def layouts(name: str, place: Place) -> list[str]:
    """Views give the bits of their contiguous clones; what comes back has no gaps."""
    streams, h0, do, dht = place.inputs(name, 77, B=2, seed=17)
    want, failures = run(name, streams, h0, do, dht), []
    for label, view in LAYOUTS.items():
        given = [view(x).requires_grad_() for x in streams]
        state = h0.detach().transpose(2, 3).contiguous().transpose(2, 3).requires_grad_()
        got = run(name, given, state, view(do), dht.transpose(1, 2).contiguous().transpose(1, 2))
        failures += differing(label, got, want)
        failures += [f"{label}: {k} has gaps" for k in ("o", "ht") if not got[k].is_contiguous()]
    flat = do[:, :1, :1, :1].expand(do.shape)
    given = (streams, h0, flat, dht), (streams, h0, flat.contiguous(), dht)
    return failures + differing("one number as do", *(run(name, *x) for x in given))


def fused(name: str, place: Place) -> list[str]:
    """Slices of one projection, and a gate that all heads share."""
    B, T, heads = 2, 41, 2
    streams, h0, do, dht = place.inputs(name, T, B=B, H=heads, HV=heads, seed=18)
    keys = [i for i, (_, shape) in enumerate(SIGNATURES[name]) if shape == "B T H K"]
    joined = torch.cat([streams[i].detach() for i in keys], -1).requires_grad_()
    parts = dict(zip(keys, joined.split(place.K, -1), strict=True))
    gates = [i for i, (_, shape) in enumerate(SIGNATURES[name]) if shape.startswith("B T HV") and names(name)[i] != "v"]
    parts |= {i: streams[i].detach()[:, :, :1].requires_grad_().expand_as(streams[i]) for i in gates}
    views = [parts.get(i, x) for i, x in enumerate(streams)]
    got = run(name, views, h0, do, dht)
    return differing("fused", got, run(name, leaves(views, torch.clone), h0, do, dht))


# ---------------------------------------------------------------------------------------------------------------------
# Packed


def packed(name: str, place: Place, bounds: Sequence[int] = (0, 5, 70, 70, 134, 200), T: int = 210) -> list[str]:
    """A call a sequence and one packed call: the same bits; int32 and int64 boundaries alike."""
    streams, _, do, _ = place.inputs(name, T, seed=19, state=False)
    N, HV = len(bounds) - 1, do.shape[2]
    generator = torch.Generator().manual_seed(20)
    h0, dht = torch.randn(2, N, HV, place.K, place.V, generator=generator).to(place.device)
    h0.requires_grad_()
    cu = torch.tensor(bounds, device=place.device)
    got = run(name, streams, h0, do, dht, cu_seqlens=cu)
    failures = differing("int32 boundaries", run(name, streams, h0, do, dht, cu_seqlens=cu.int()), got)
    for n, (start, end) in enumerate(itertools.pairwise(bounds)):
        own = leaves(streams, lambda x, s=start, e=end: x[:, s:e].clone())
        alone = run(name, own, h0[n : n + 1].detach().requires_grad_(), do[:, start:end], dht[n : n + 1])
        part = {k: x[n : n + 1] if k in ("ht", "dh0") else x[:, start:end] for k, x in got.items()}
        failures += differing(f"sequence {n} packed", part, alone)
    tail = [k for k, x in got.items() if k not in ("ht", "dh0") and (x[:, bounds[-1] :] != 0).any()]
    spoiled, streams = slice(*bounds[1:3]), leaves(streams, lambda x: x.clone())
    h0, dht, do = h0.detach().clone(), dht.clone(), do.clone()
    with torch.no_grad():
        for x in (*(x[:, spoiled] for x in (*streams, do)), h0[1], dht[1]):
            x.fill_(float("nan"))
    got, want = run(name, streams, h0.requires_grad_(), do, dht, cu_seqlens=cu), got
    for n in (n for n in range(N) if n != 1):
        parts = [
            {k: x[n] if k in ("ht", "dh0") else x[:, bounds[n] : bounds[n + 1]] for k, x in result.items()}
            for result in (got, want)
        ]
        failures += differing(f"sequence {n} beside one of NaN", *parts)
    return failures + [f"packed: {k} is not 0 past the last boundary" for k in tail]


CHECKS: tuple[Callable[[str, Place], list[str]], ...] = (
    strong_gates,
    growing_gates,
    no_gate,
    hard_keys,
    wide_range,
    additive_cotangents,
    every_tail,
    nothing_at_all,
    group_sums,
    repeats,
    rows_alone,
    causal,
    hand_off,
    steps,
    layouts,
    fused,
    packed,
)


#: The variants that a check asks something of, where these are not all.
ASKED: dict[Callable[[str, Place], list[str]], Callable[[str], bool]] = {
    strong_gates: has_gate,
    growing_gates: lambda name: has_gate(name) and name != "gdn2_clipped",  # its clip bounds what grows
    hard_keys: lambda name: name not in ("gla", "simple_gla"),  # they erase nothing
}


def asks(check: Callable[[str, Place], list[str]], name: str) -> bool:
    return ASKED.get(check, lambda _: True)(name)


# ---------------------------------------------------------------------------------------------------------------------
# Draws: any of it together


@dataclass(frozen=True)
class Draw:
    """One call of an op, everything about it drawn."""

    variant: str
    dtype: str
    K: int
    V: int
    T: int
    H: int
    group: int
    rows: int
    sequences: int  # 0: not packed
    states: str
    gates: str
    layout: str
    scale: float | None
    seed: int


CHOICES: dict[str, tuple[object, ...]] = {
    "variant": tuple(SIGNATURES),
    "dtype": ("float32", "bfloat16", "float16", "bfloat16+float32"),
    "K": (1, 3, 10, 16, 33, 60, 64, 100, 128),
    "V": (1, 5, 14, 16, 60, 64, 100, 128),
    "T": (1, 2, 15, 31, 32, 33, 63, 64, 65, 97, 130),
    "H": (1, 2, 3),
    "group": (1, 2, 3),
    "rows": (1, 2, 3),
    "sequences": (0, 0, 1, 2, 5),
    "states": ("none", "in", "out", "both"),
    "gates": REGIMES,
    "layout": ("plain", *LAYOUTS),
    "scale": (None, 1.0, 0.125, 1),
}


def drawn_case(pick: Callable[[Sequence[object]], object], seed: int, **choices: Sequence[object]) -> Draw:
    """A draw with each field picked from its choices."""
    table = CHOICES | choices
    values = {key: pick(table[key]) for key in CHOICES}
    return Draw(**values, seed=seed)  # type: ignore[arg-type]


def boundaries(draw: Draw) -> list[int]:
    """Random cuts of the row, equal ones (empty sequences) included, tokens of no sequence at the end at times."""
    generator = torch.Generator().manual_seed(draw.seed)
    cuts = torch.randint(0, draw.T + 1, (draw.sequences - 1,), generator=generator).tolist()
    end = max(draw.T - int(torch.randint(0, 4, (1,), generator=generator)) * (draw.seed % 3 == 0), 0)
    return sorted([0, *(min(c, end) for c in cuts), end])


def check_draw(draw: Draw, place: Place) -> list[str]:
    """What is wrong with the op on this draw; packed calls are judged sequence by sequence."""
    streams_dtype, _, gates = draw.dtype.partition("+")
    dtype, gate_dtype = getattr(torch, streams_dtype), getattr(torch, gates or streams_dtype)
    place = dataclasses.replace(place, dtype=dtype, K=draw.K, V=draw.V)
    rows = 1 if draw.sequences else draw.rows
    has_in, has_out = draw.states in ("in", "both"), draw.states in ("out", "both")
    sizes = {"B": rows, "H": draw.H, "HV": draw.H * draw.group}
    regime = {"regime": draw.gates, "seed": draw.seed, "gate_dtype": gate_dtype}
    streams, h0, do, dht = place.inputs(draw.variant, draw.T, **sizes, **regime)
    view = LAYOUTS.get(draw.layout, lambda x: x.detach().clone())
    streams, do = [view(x).requires_grad_() for x in streams], view(do)
    if not draw.sequences:
        h0, dht = (h0 if has_in else None), (dht if has_out else None)
        got = metrics.collect(
            of(draw.variant), draw.variant, streams, h0, do, dht, draw.scale, output_final_state=has_out
        )
        ref = place.reference(draw.variant, streams, h0, do, dht, draw.scale)
        if not has_out:
            del ref["ht"]
        return _forgiving(draw.T, place, metrics.check(draw.variant, got, ref, dtype, streams))
    bounds = boundaries(draw)
    generator = torch.Generator().manual_seed(draw.seed)
    shape = (2, draw.sequences, sizes["HV"], draw.K, draw.V)
    h0, dht = torch.randn(shape, generator=generator).to(place.device) * torch.tensor([1, draw.K**-0.5]).view(
        2, 1, 1, 1, 1
    ).to(place.device)
    h0, dht = (h0.requires_grad_() if has_in else None), (dht if has_out else None)
    cu = torch.tensor(bounds, device=place.device)
    options = {"output_final_state": has_out, "cu_seqlens": cu}
    got = metrics.collect(of(draw.variant), draw.variant, streams, h0, do, dht, draw.scale, **options)
    failures = []
    for n, (start, end) in enumerate(itertools.pairwise(bounds)):
        if start == end:
            continue
        own = [x[:, start:end] for x in streams]
        state, last = (None if x is None else x[n : n + 1] for x in (h0, dht))
        ref = place.reference(draw.variant, own, state, do[:, start:end], last, draw.scale)
        if not has_out:
            del ref["ht"]
        part = {k: x[n : n + 1] if k in ("ht", "dh0") else x[:, start:end] for k, x in got.items()}
        found = metrics.check(draw.variant, part, ref, dtype, own)
        failures += [f"sequence {n}: {x}" for x in _forgiving(end - start, place, found)]
    return failures


def _forgiving(T: int, place: Place, failures: list[str]) -> list[str]:
    """Without the rules on single heads where the op rounds to 16 bits and a head is a few tokens: their inner products
    may cancel to nearly nothing, so that no product of 16-bit operands meets a relative bound."""
    if not place.rounds or T >= 16:
        return failures
    return [x for x in failures if "(batch, head" not in x]


def draws(count: int, seed: int, **choices: Sequence[object]) -> Iterator[Draw]:
    """Draws from a seed."""
    generator = torch.Generator().manual_seed(seed)

    def pick(options: Sequence[object]) -> object:
        return options[int(torch.randint(len(options), (1,), generator=generator))]

    for number in range(count):
        yield drawn_case(pick, seed * 1_000_003 + number, **choices)
