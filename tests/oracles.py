"""Float64 token loops, one a variant, each written from the equation that the variant is published with.

Nothing here imports the package under test. Every loop works on the state as the API stores it, `h [N, HV, K, V]`
(the transpose of the `S [V, K]` of the papers that write the state from the left), computes in float64 whatever dtype
comes in, is differentiable by autograd and runs on any device.

    glossary    read(h, x) = h^T x      [.., V]     what the state holds under the key x
                outer(x, u) = x u^T     [.., K, V]  the write of value u under the key x
                streams with H heads are repeated to HV first: head i of q serves value heads i*HV/H .. (i+1)*HV/H - 1
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Oracle = Callable[..., tuple[Tensor, Tensor]]

KEY, VALUE = "B T H K", "B T HV V"
HEAD, CHANNEL = "B T HV", "B T HV K"

SIGNATURES: dict[str, tuple[tuple[str, str], ...]] = {
    "gdn": (("q", KEY), ("k", KEY), ("v", VALUE), ("g", HEAD), ("beta", HEAD)),
    "kda": (("q", KEY), ("k", KEY), ("v", VALUE), ("g", CHANNEL), ("beta", HEAD)),
    "dplr": (("q", KEY), ("k", KEY), ("v", VALUE), ("a", KEY), ("b", KEY), ("g", CHANNEL)),
    "dplr_absorbed": (("q", KEY), ("k", KEY), ("v", VALUE), ("a", KEY), ("d", KEY), ("g", CHANNEL)),
    "gdn2_clipped": (("q", KEY), ("k", KEY), ("j", KEY), ("v", VALUE), ("g", CHANNEL), ("eta", HEAD)),
    "delta": (("q", KEY), ("k", KEY), ("v", VALUE), ("beta", HEAD)),
    "simple_gla": (("q", KEY), ("k", KEY), ("v", VALUE), ("g", HEAD)),
    "gla": (("q", KEY), ("k", KEY), ("v", VALUE), ("g", CHANNEL)),
    "gdn2": (("q", KEY), ("k", KEY), ("v", VALUE), ("e", CHANNEL), ("w", VALUE), ("g", CHANNEL)),
    "rwkv7": (("q", KEY), ("k", KEY), ("v", VALUE), ("a", KEY), ("b", KEY), ("g", CHANNEL)),
    "comba": (("q", KEY), ("k", KEY), ("v", VALUE), ("p", KEY), ("g", HEAD), ("beta", HEAD)),
}

GATES = frozenset({"g", "beta", "eta", "e", "w"})
"""Streams that may be float32 beside low-precision q, k, v."""


def names(variant: str) -> tuple[str, ...]:
    """The stream names of a variant, in the order of its call."""
    return tuple(name for name, _ in SIGNATURES[variant])


def read(h: Tensor, x: Tensor) -> Tensor:
    return (x.unsqueeze(-2) @ h).squeeze(-2)


def outer(x: Tensor, u: Tensor) -> Tensor:
    return x.unsqueeze(-1) * u.unsqueeze(-2)


def _over_state(x: Tensor) -> Tensor:
    """A decay, `[.., 1]` a head or `[.., K]` a channel, as a factor of the state."""
    return x.unsqueeze(-1)


# One token of every variant: the state and the token's streams to the next state. The streams are [B, HV, K] or
# [B, HV, V]; numbers a head come as [B, HV, 1]; `alpha` is exp(g).


def _gdn(h: Tensor, k: Tensor, v: Tensor, alpha: Tensor, beta: Tensor) -> Tensor:
    """Gated DeltaNet: S_t = S_{t-1} (alpha_t (I - beta_t k_t k_t^T)) + beta_t v_t k_t^T."""
    erased = h - outer(beta * k, read(h, k))
    return _over_state(alpha) * erased + outer(k, beta * v)


def _kda(h: Tensor, k: Tensor, v: Tensor, alpha: Tensor, beta: Tensor) -> Tensor:
    """Kimi Delta Attention: S <- Diag(alpha) S, then S <- S + beta k (v - S^T k)^T."""
    h = _over_state(alpha) * h
    return h + outer(k, beta * (v - read(h, k)))


def _dplr(h: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, alpha: Tensor) -> Tensor:
    """Gated DPLR: S_t = S_{t-1} Diag(alpha_t) (I - b_t a_t^T) + v_t k_t^T, so h = (I - a b^T) Diag(alpha) h + k v^T."""
    h = _over_state(alpha) * h
    return h - outer(a, read(h, b)) + outer(k, v)


def _dplr_absorbed(h: Tensor, k: Tensor, v: Tensor, a: Tensor, d: Tensor, alpha: Tensor) -> Tensor:
    """Gate absorbed: S_t = S_{t-1} (Diag(alpha_t) - d_t a_t^T) + v_t k_t^T, so h = (Diag(alpha) - a d^T) h + k v^T."""
    return _over_state(alpha) * h - outer(a, read(h, d)) + outer(k, v)


def _gdn2_clipped(h: Tensor, k: Tensor, j: Tensor, v: Tensor, alpha: Tensor, eta: Tensor) -> Tensor:
    """S_t = S_{t-1} Diag(alpha_t) (I - eta_t k_t j_t^T) + eta_t v_t k_t^T, alpha already clipped to 1 / rho."""
    h = _over_state(alpha) * h
    return h - outer(j, read(h, eta * k)) + outer(k, eta * v)


def _delta(h: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> Tensor:
    """DeltaNet: S_t = S_{t-1} - beta_t (S_{t-1} k_t - v_t) k_t^T."""
    return h - outer(k, beta * (read(h, k) - v))


def _gla(h: Tensor, k: Tensor, v: Tensor, alpha: Tensor) -> Tensor:
    """Gated linear attention: S_t = Diag(alpha_t) S_{t-1} + k_t v_t^T; simple_gla with one alpha a head."""
    return _over_state(alpha) * h + outer(k, v)


def _gdn2(h: Tensor, k: Tensor, v: Tensor, e: Tensor, w: Tensor, alpha: Tensor) -> Tensor:
    """Gated DeltaNet-2: S_t = (I - k_t (e_t * k_t)^T) Diag(alpha_t) S_{t-1} + k_t (w_t * v_t)^T."""
    h = _over_state(alpha) * h
    return h + outer(k, w * v - read(h, e * k))


def _rwkv7(h: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, alpha: Tensor) -> Tensor:
    """RWKV-7 with flash-linear-attention's signs: h_t = Diag(alpha_t) h_{t-1} + b_t (a_t^T h_{t-1}) + k_t v_t^T."""
    return _over_state(alpha) * h + outer(b, read(h, a)) + outer(k, v)


def _comba(h: Tensor, k: Tensor, v: Tensor, p: Tensor, alpha: Tensor, beta: Tensor) -> Tensor:
    """Comba, decay first: h <- alpha h, then h <- h + k beta (v - h^T p)^T."""
    h = _over_state(alpha) * h
    return h + outer(k, beta * (v - read(h, p)))


def _comba_closed_loop(h: Tensor, k: Tensor, v: Tensor, p: Tensor, alpha: Tensor, beta: Tensor) -> Tensor:
    """Comba, reading before the decay: S_t = S_{t-1} (alpha_t - beta_t p_t k_t^T) + beta_t v_t k_t^T."""
    return _over_state(alpha) * h + outer(k, beta * (v - read(h, p)))


def _positive_sqrt(x: Tensor) -> Tensor:
    """The square root, with derivative 0 where it is 0."""
    inside = x > 0
    return torch.where(inside, torch.where(inside, x, 1.0).sqrt(), 0.0)


def _unit(x: Tensor) -> tuple[Tensor, Tensor]:
    """The length of x and x over it; a zero row gives zeros, and finite gradients."""
    length = _positive_sqrt((x * x).sum(-1, keepdim=True))
    return length, x / torch.where(length > 0, length, 1.0)


def log_rho(x: Tensor, y: Tensor) -> Tensor:
    """log of the spectral norm of I - x y^T, `[.., 1]`, in the form that survives rounding: with n = |x||y|,

    rho = (n + sqrt((n - 2)^2 + 4 u)) / 2,   u = n - x.y = (n/2) | x/|x| - y/|y| |^2.
    """
    length_x, unit_x = _unit(x)
    length_y, unit_y = _unit(y)
    n = length_x * length_y
    u = n / 2 * ((unit_x - unit_y) ** 2).sum(-1, keepdim=True)
    return ((n + _positive_sqrt((n - 2) ** 2 + 4 * u)) / 2).log()


def clipped_gate(g: Tensor, x: Tensor, y: Tensor, eps: float | None = None) -> Tensor:
    """min(g, -log rho), the clip active only where log rho > -g + 8 eps; elsewhere only g gets a gradient.

    `eps` is that of the dtype which the op under test computes in, by default the dtype of g.
    """
    bound = log_rho(x, y)
    margin = 8 * (torch.finfo(g.dtype).eps if eps is None else eps)
    return torch.where(bound > -g + margin, -bound, g)


def computing_eps(dtype: torch.dtype) -> float:
    """The eps of the dtype that an op computes in: float64 for float64 inputs, float32 for all others."""
    return torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps


def _prepare(x: Tensor, shape: str, value_heads: int) -> Tensor:
    """float64, HV heads, a trailing axis for numbers a head, tokens first."""
    x = x.double()
    if "HV" not in shape.split():
        x = x.repeat_interleave(value_heads // x.shape[2], dim=2)
    if shape == HEAD:
        x = x.unsqueeze(-1)
    return x.transpose(0, 1)


def _loop(variant: str, step: Callable[..., Tensor]) -> Oracle:
    """The token loop of one variant: `o_t = scale * h_t^T q_t` with `h_t = step(h_{t-1}, the token's streams)`.

    `eps` matters to the margin of the clip alone: the loop computes in float64, the op that it judges perhaps not.
    """
    signature = SIGNATURES[variant]

    def oracle(
        *streams: Tensor,
        scale: float | None = None,
        initial_state: Tensor | None = None,
        eps: float | None = None,
    ) -> tuple[Tensor, Tensor]:
        if len(streams) != len(signature):
            raise TypeError(f"{variant} takes {len(signature)} streams, got {len(streams)}")
        value = streams[names(variant).index("v")]
        batch, _, value_heads, value_size = value.shape
        token = {n: _prepare(x, s, value_heads) for (n, s), x in zip(signature, streams, strict=True)}
        q = token.pop("q")
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        if variant == "gdn2_clipped":
            eps = computing_eps(value.dtype) if eps is None else eps
            token["g"] = clipped_gate(token["g"], token["eta"] * token["k"], token["j"], eps)
        if "g" in token:
            token["alpha"] = token.pop("g").exp()

        if initial_state is None:
            h = q.new_zeros(batch, value_heads, q.shape[-1], value_size)
        else:
            h = initial_state.double()
        rows = {n: x.unbind(0) for n, x in token.items()}
        outputs = []
        for t, query in enumerate(q.unbind(0)):
            h = step(h, **{n: x[t] for n, x in rows.items()})
            outputs.append(scale * read(h, query))
        o = torch.stack(outputs, dim=1) if outputs else h.new_zeros(batch, 0, value_heads, value_size)
        return o, h

    oracle.__name__ = oracle.__qualname__ = variant
    oracle.__doc__ = step.__doc__
    return oracle


ORACLES: dict[str, Oracle] = {
    "gdn": _loop("gdn", _gdn),
    "kda": _loop("kda", _kda),
    "dplr": _loop("dplr", _dplr),
    "dplr_absorbed": _loop("dplr_absorbed", _dplr_absorbed),
    "gdn2_clipped": _loop("gdn2_clipped", _gdn2_clipped),
    "delta": _loop("delta", _delta),
    "simple_gla": _loop("simple_gla", _gla),
    "gla": _loop("gla", _gla),
    "gdn2": _loop("gdn2", _gdn2),
    "rwkv7": _loop("rwkv7", _rwkv7),
    "comba": _loop("comba", _comba),
}

comba_closed_loop = _loop("comba", _comba_closed_loop)
"""Comba as its paper and its kernels have it: the feedback reads the state before the decay."""
