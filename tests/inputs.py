"""Test inputs by one law: unit queries and keys, gates as a model makes them, and the gate regimes that break kernels.

q, k, a, j, p  randn scaled to unit length          v, do, initial_state  randn
beta, eta, e, w  uniform in (0, 1)                  g  by regime:

    weak     0.01 logsigmoid(randn)                 mild     logsigmoid(randn)
    strong   -20 everywhere                         spikes   -1e4 at a tenth of the tokens, else logsigmoid(randn)
    zero     0 everywhere                           expand   0 everywhere, with b unrelated to a: float32 only

The erase term is b = beta a', with a' = a where nothing decays (weak, zero) and an independent unit vector elsewhere;
`comba` takes p = k and p independent in the same way. The gate-absorbed forms take d = alpha b, so that the transition
is that of `dplr`, and d = b where alpha is 0 to rounding. A variant without a gate ignores the regime.

dht is randn times K^-1/2, the scale with which do reaches the state. At randn the last tokens' gradients would stand so
far above the mean of their head that the rule on blocks of 16 rows would measure the rounding of bfloat16 itself.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from oracles import GATES, SIGNATURES, log_rho
from torch import Tensor

REGIMES = ("weak", "mild", "strong", "spikes", "zero")


def has_gate(variant: str) -> bool:
    return any(name == "g" for name, _ in SIGNATURES[variant])


def erases_freely(variant: str) -> bool:
    """Whether the erase term is free of the key, so that the regime `expand` means something."""
    return variant in ("dplr", "dplr_absorbed", "rwkv7", "comba")


def make(
    name: str,
    B: int,
    T: int,
    H: int,
    HV: int,
    K: int,
    V: int,
    dtype: torch.dtype,
    gate_dtype: torch.dtype | None = None,
    regime: str = "mild",
    seed: int = 0,
    state: bool = True,
    device: str | torch.device = "cpu",
) -> tuple[list[Tensor], Tensor | None, Tensor, Tensor]:
    """The streams of a variant in call order, its initial state, and the cotangents of output and final state.

    Everything is drawn on the CPU in float64 and rounded once, so that a seed means the same numbers everywhere.
    Streams and state are leaves that require grad; gates have `gate_dtype`, by default the dtype of the rest.
    """
    if regime not in (*REGIMES, "expand"):
        raise ValueError(f"regime must be one of {REGIMES} or 'expand', got {regime!r}")
    generator = torch.Generator().manual_seed(seed)
    size = {"B": B, "T": T, "H": H, "HV": HV, "K": K, "V": V}

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    def unit() -> Tensor:
        return F.normalize(normal(B, T, H, K), dim=-1)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(shape, generator=generator, dtype=torch.float64)

    shape_of = {stream: tuple(size[s] for s in shape.split()) for stream, shape in SIGNATURES[name]}
    drawn: dict[str, Tensor] = {"q": unit(), "k": unit(), "v": normal(B, T, HV, V)}
    for gate in ("beta", "eta", "e", "w"):
        if gate in shape_of:
            drawn[gate] = uniform(*shape_of[gate])
    if "j" in shape_of:
        drawn["j"] = unit()

    spiked = torch.zeros(B, T, HV, dtype=torch.bool)
    if "g" in shape_of:
        drawn["g"], spiked = _gate(regime, uniform(B, T, HV), normal(*shape_of["g"]))

    follows = regime in ("weak", "zero")
    if "p" in shape_of:
        drawn["p"] = drawn["k"] if follows else unit()
    if "a" in shape_of:
        a = unit()
        b = uniform(B, T, H, 1) * (a if follows else unit())
        alpha = drawn["g"].exp().unflatten(2, (H, HV // H)).amin(3)
        barren = spiked.unflatten(2, (H, HV // H)).any(3).unsqueeze(-1)
        d = torch.where(barren, b, b * alpha)
        erase = {"dplr": {"a": a, "b": b}, "dplr_absorbed": {"a": a, "d": d}, "rwkv7": {"a": -d, "b": a}}
        drawn |= erase[name]

    def leaf(x: Tensor, as_dtype: torch.dtype) -> Tensor:
        return x.to(device=device, dtype=as_dtype).contiguous().clone().requires_grad_()

    streams = [leaf(drawn[s], (gate_dtype or dtype) if s in GATES else dtype) for s in shape_of]
    if name == "gdn2_clipped":
        _leave_ties(*streams[1:3], *streams[4:])
    state_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    initial_state = leaf(normal(B, HV, K, V), state_dtype) if state else None
    do = normal(B, T, HV, V).to(device=device, dtype=dtype)
    dht = (normal(B, HV, K, V) * K**-0.5).to(device=device, dtype=state_dtype)
    return streams, initial_state, do, dht


def _gate(regime: str, lot: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """The log-decay of a regime, and where (token and head) it leaves nothing."""
    nowhere = torch.zeros_like(lot, dtype=torch.bool)
    if regime in ("zero", "expand"):
        return torch.zeros_like(noise), nowhere
    if regime == "strong":
        return torch.full_like(noise, -20.0), ~nowhere
    g = F.logsigmoid(noise) * (0.01 if regime == "weak" else 1.0)
    if regime != "spikes":
        return g, nowhere
    spiked = lot < 0.1
    if not spiked.any():
        spiked[:, lot.shape[1] // 2] = True
    return torch.where(spiked.reshape(*spiked.shape, *[1] * (noise.ndim - spiked.ndim)), -1e4, g), spiked


@torch.no_grad()
def _leave_ties(k: Tensor, j: Tensor, g: Tensor, eta: Tensor) -> None:
    """Moves gates that lie within rounding of the clip: there float32 and float64 may rightly differ in who clips.

    In a long sequence some element always does, and its gradient goes to g in one and to k, j, eta in the other.
    """
    groups = g.shape[2] // k.shape[2]
    k, j = (x.double().repeat_interleave(groups, dim=2) for x in (k, j))
    near = (g.double() + log_rho(eta.double().unsqueeze(-1) * k, j)).abs() < 1e-5
    g.copy_(torch.where(near & (g != 0), g * (1 - 2**-5), g))
