"""The clip of GDN2: the spectral norm in closed form, the stability that it buys, and gradients at its kinks."""

from __future__ import annotations

import metrics
import pytest
import torch
import torch.nn.functional as F
from inputs import make
from oracles import log_rho
from torch import Tensor

from dplrgen import ops

torch.set_num_threads(1)

F32, F64 = torch.float32, torch.float64


def spectral_norm(x: Tensor, y: Tensor) -> Tensor:
    """rho(I - x y^T) as printed: (n + sqrt(n^2 - 4 x.y + 4)) / 2 with n = |x||y|."""
    n = x.norm(dim=-1) * y.norm(dim=-1)
    return (n + (n**2 - 4 * (x * y).sum(-1) + 4).clamp(min=0).sqrt()) / 2


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def pairs(size: int) -> tuple[Tensor, Tensor]:
    """Vectors of every length and angle: free, parallel, opposed, orthogonal, tiny, zero, and of length product 2."""
    x, y = normal(700, size, seed=size), normal(700, size, seed=size + 1)
    x = x * 10 ** torch.linspace(-3, 1, 700, dtype=F64).unsqueeze(-1)
    y[100:200] = x[100:200] * torch.linspace(0.01, 3, 100, dtype=F64).unsqueeze(-1)
    y[200:300] = -x[200:300]
    y[300:400] -= (
        (y[300:400] * x[300:400]).sum(-1, keepdim=True) / x[300:400].square().sum(-1, keepdim=True) * x[300:400]
    )
    x[400:500], y[400:500] = F.normalize(x[400:500], dim=-1), 2 * F.normalize(x[400:500], dim=-1)
    x[500:510], y[510:520] = 0, 0
    return x, y


@pytest.mark.parametrize("size", [2, 3, 16, 64])
def test_rho_is_the_spectral_norm(size: int) -> None:
    x, y = pairs(size)
    matrix = torch.eye(size, dtype=F64) - x.unsqueeze(-1) * y.unsqueeze(-2)
    exact = torch.linalg.matrix_norm(matrix, ord=2)
    assert torch.allclose(spectral_norm(x, y), exact, rtol=1e-7, atol=0)
    assert torch.allclose(log_rho(x, y).squeeze(-1).exp(), exact, rtol=1e-13, atol=0)
    assert bool((exact >= 1 - 1e-12).all())


def test_rho_bounds_the_norm_in_one_dimension() -> None:
    x, y = pairs(1)
    exact = (1 - x * y).abs().squeeze(-1)
    bound = spectral_norm(x, y)
    assert bool((bound >= exact - 1e-12).all())
    assert bool((bound > exact + 0.1).any())


def test_rho_is_one_only_for_vectors_that_point_the_same_way() -> None:
    x, y = normal(200, 8, seed=1), normal(200, 8, seed=2)
    assert bool((spectral_norm(x, y) > 1 + 1e-6).all())
    short = F.normalize(x, dim=-1)
    lengths = torch.linspace(0, 2, 200, dtype=F64).unsqueeze(-1)
    assert torch.allclose(log_rho(short, lengths * short), torch.zeros(200, 1, dtype=F64), atol=1e-14)
    assert bool((spectral_norm(short, 2.1 * short) > 1.09).all())


def transition(k: Tensor, j: Tensor, g: Tensor, eta: Tensor) -> Tensor:
    """`(I - j x^T) Diag(alpha)` as the op applies it to the state, read off one token: `[N, K, K]` of `[N, K]`."""
    count, size = k.shape
    streams = [x.reshape(count, 1, 1, -1) for x in (torch.ones_like(k), k, j, torch.zeros_like(k), g)]
    eye = torch.eye(size, dtype=k.dtype).expand(count, 1, size, size).contiguous()
    _, state = ops.gdn2_clipped(*streams, eta.reshape(count, 1, 1), initial_state=eye, output_final_state=True)
    return state[:, 0]


@pytest.mark.parametrize("size", [16, 24])
def test_the_op_clips_to_the_spectral_norm(size: int) -> None:
    """Against the singular values: with g = 0 the transition has norm 1 exactly, with any g at most 1."""
    x, y = pairs(size)
    eta = torch.ones(len(x), dtype=F64)
    at_rest = torch.linalg.matrix_norm(transition(x, y, torch.zeros_like(x), eta), ord=2)
    assert torch.allclose(at_rest, torch.ones_like(at_rest), rtol=1e-12, atol=0)

    g = F.logsigmoid(normal(*x.shape, seed=5))
    got = transition(x, y, g, eta)
    free = torch.eye(size, dtype=F64) - y.unsqueeze(-1) * x.unsqueeze(-2)
    alpha = torch.minimum(g.exp(), 1 / torch.linalg.matrix_norm(free, ord=2).unsqueeze(-1))
    assert torch.allclose(got, free * alpha.unsqueeze(-2), rtol=1e-11, atol=1e-13)
    assert bool((torch.linalg.matrix_norm(got, ord=2) <= 1 + 1e-12).all())


def test_eta_scales_the_key_inside_the_norm() -> None:
    k, j = normal(300, 16, seed=6), normal(300, 16, seed=7)
    eta = torch.linspace(0, 4, 300, dtype=F64)
    ones = torch.ones_like(eta)
    g = F.logsigmoid(normal(300, 16, seed=8))
    assert torch.allclose(
        transition(k, j, g, eta), transition(eta.unsqueeze(-1) * k, j, g, ones), rtol=1e-11, atol=1e-13
    )


def experiment(runs: int, steps: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """K = V = 16, independent unit j and k, eta uniform in [0, 2], v randn; tokens first."""
    k = F.normalize(normal(steps, runs, 16, seed=30), dim=-1)
    j = F.normalize(normal(steps, runs, 16, seed=31), dim=-1)
    v = normal(steps, runs, 16, seed=32)
    eta = 2 * torch.rand(steps, runs, 1, generator=torch.Generator().manual_seed(33), dtype=F64)
    alpha = 1 / spectral_norm(eta * k, j).unsqueeze(-1)
    return k, j, v, eta, alpha


def states(k: Tensor, j: Tensor, v: Tensor, eta: Tensor, alpha: Tensor):
    """The state after each token, `[runs, V, K]`: S <- S Diag(alpha) (I - eta k j^T) + eta v k^T."""
    state = torch.zeros(k.shape[1], 16, 16, dtype=F64)
    for k_t, j_t, v_t, eta_t, alpha_t in zip(k, j, v, eta, alpha, strict=True):
        state = state * alpha_t.unsqueeze(-2)
        change = eta_t * v_t
        erased = (state @ (eta_t * k_t).unsqueeze(-1)) * j_t.unsqueeze(-2)
        state = state - erased + change.unsqueeze(-1) * k_t.unsqueeze(-2)
        yield state


def test_without_the_clip_the_state_passes_1e12_in_a_thousand_steps() -> None:
    k, j, v, eta, alpha = experiment(runs=4, steps=1000)
    largest = torch.zeros(4, dtype=F64)
    for state in states(k, j, v, eta, torch.ones_like(alpha)):
        largest = torch.maximum(largest, torch.linalg.matrix_norm(state))
    assert bool((largest > 1e12).all())


def test_with_the_clip_the_state_stays_small_for_twenty_thousand_steps() -> None:
    """The float64 loop below norm 20 throughout, and the op, fed its own state in parts, beside it."""
    steps, part = 20_000, 2_000
    k, j, v, eta, alpha = experiment(runs=4, steps=steps)
    streams = [x.transpose(0, 1).unsqueeze(2).float() for x in (k, k, j, v, torch.zeros_like(k))]
    eta_of = eta.transpose(0, 1).float()
    carried = None
    for t, state in enumerate(states(k, j, v, eta, alpha), start=1):
        assert torch.linalg.matrix_norm(state).max() < 20
        if t % part == 0:
            now = [x[:, t - part : t] for x in (*streams, eta_of)]
            with torch.no_grad():
                _, carried = ops.gdn2_clipped(*now, initial_state=carried, output_final_state=True)
            assert metrics.rr(carried[:, 0], state.mT) < 1e-3


def gradients(k: Tensor, j: Tensor, g: Tensor, eta: Tensor, v: Tensor | None = None) -> dict[str, Tensor]:
    """All gradients of the op on one head, `k`, `j`, `g` `[T, K]` and eta `[T]`."""
    tokens, size = k.shape
    v = normal(tokens, size, seed=40) if v is None else v
    streams = [x.to(k.dtype).reshape(1, tokens, 1, -1) for x in (normal(tokens, size, seed=41), k, j, v, g)]
    leaves = [x.clone().requires_grad_() for x in (*streams, eta.to(k.dtype).reshape(1, tokens, 1))]
    state = normal(1, 1, size, size, seed=42).to(k.dtype).requires_grad_()
    do, dht = normal(1, tokens, 1, size, seed=43), normal(1, 1, size, size, seed=44)
    return metrics.run(ops.gdn2_clipped, "gdn2_clipped", leaves, state, do.to(k.dtype), dht.to(k.dtype))


@pytest.mark.parametrize("dtype", [F64, F32], ids=["float64", "float32"])
@pytest.mark.parametrize("gate", [0.0, 0.1, -0.1])
@pytest.mark.parametrize("sign", [1.0, -1.0], ids=["parallel", "opposed"])
def test_gradients_are_finite_where_the_root_vanishes(sign: float, gate: float, dtype: torch.dtype) -> None:
    """n = 2 and x parallel to y: rho = 1, the square root is of 0. At g = 0.1 the clip is active there."""
    k = torch.eye(16, dtype=dtype)[:5].repeat(4, 1)
    got = gradients(k, sign * k, torch.full_like(k, gate), torch.full((20,), 2.0))
    assert all(bool(torch.isfinite(x).all()) for x in got.values())
    active = gate > 0 or sign < 0
    assert bool((got["dg"] == 0).all()) == active


@pytest.mark.parametrize("dtype", [F64, F32], ids=["float64", "float32"])
@pytest.mark.parametrize("offset", [1e-3, 1e-8, 1e-20, 1e-30])
def test_gradients_are_finite_near_the_root(offset: float, dtype: torch.dtype) -> None:
    k = torch.eye(16, dtype=dtype)[:5].repeat(4, 1)
    j = k + offset * normal(20, 16, seed=45).to(dtype)
    for eta in (2.0, 2.0 + offset, 2.0 - offset):
        got = gradients(k, j, torch.full_like(k, 0.05), torch.full((20,), eta))
        assert all(bool(torch.isfinite(x).all()) for x in got.values())
        assert all(metrics.rms(x) < 1e4 for x in got.values())


@pytest.mark.parametrize("gate", [0.0, -0.5, 0.05])
@pytest.mark.parametrize("zeroed", ["k", "j", "eta", "all"])
def test_zero_rows(zeroed: str, gate: float) -> None:
    """A token whose key, erase direction or strength is 0 does not clip; values and gradients like those of dplr."""
    tokens, size = 40, 16
    streams, h0, do, dht = make("gdn2_clipped", 1, tokens, 1, 1, size, 24, F64, regime="zero", seed=46)
    with torch.no_grad():
        streams[4].fill_(gate)
        for at, name in ((1, "k"), (2, "j"), (5, "eta")):
            if zeroed in (name, "all"):
                streams[at][:, ::3] = 0
    got = metrics.run(ops.gdn2_clipped, "gdn2_clipped", streams, h0, do, dht)
    assert all(bool(torch.isfinite(x).all()) for x in got.values())
    if gate <= 0:
        ref = metrics.reference("gdn2_clipped", streams, h0, do, dht)
        failures = metrics.check("gdn2_clipped", got, ref, F64, streams)
        assert not failures, "\n".join(failures)


def test_an_idle_clip_gives_gradients_to_the_gate_alone() -> None:
    """Below -log rho everywhere: rho must not reach k, j and eta, so dplr without any clip is the reference."""
    streams, h0, do, dht = make("gdn2_clipped", 1, 50, 1, 1, 16, 24, F64, seed=47)
    with torch.no_grad():
        streams[4].sub_(1.0)

    def unclipped(q, k, j, v, g, eta, **options):
        eta = eta.unsqueeze(-1)
        return ops.dplr(q, k, eta * v, j, eta * k, g, output_final_state=True, **options)

    got = metrics.run(ops.gdn2_clipped, "gdn2_clipped", streams, h0, do, dht)
    want = metrics.collect(unclipped, "gdn2_clipped", streams, h0, do, dht)
    figures = metrics.worst(got, want)
    assert max(figures.values()) < 1e-10, figures


def test_an_active_clip_takes_the_gradient_from_the_gate() -> None:
    """Channel by channel: exactly zero where the clip is active, not zero elsewhere."""
    streams, h0, do, dht = make("gdn2_clipped", 1, 50, 1, 1, 16, 24, F64, seed=48)
    with torch.no_grad():
        streams[4].mul_(0.3)
    _, k, j, _, g, eta = (x.detach() for x in streams)
    bound = -spectral_norm(eta.unsqueeze(-1) * k, j).log().unsqueeze(-1)
    active = g > bound + 1e-9
    assert 0.2 < active.double().mean() < 0.8
    dg = metrics.run(ops.gdn2_clipped, "gdn2_clipped", streams, h0, do, dht)["dg"]
    assert bool((dg[active] == 0).all())
    assert bool((dg[~active] != 0).all())


@pytest.mark.parametrize(("dtype", "eps"), [(F64, 2.0**-52), (F32, 2.0**-23)], ids=["float64", "float32"])
@pytest.mark.parametrize("within", [True, False])
def test_the_clip_leaves_a_margin_of_rounding(within: bool, dtype: torch.dtype, eps: float) -> None:
    """At n = 1, log rho is u = |x/|x| - y/|y||^2 / 2: 4 eps over -g = 0 is no clip, 100 eps is one."""
    angle = (2 * (4 if within else 100) * eps) ** 0.5
    k = torch.zeros(6, 16, dtype=dtype)
    k[:, 0] = 1.0
    j = k.clone()
    j[:, 1] = angle
    dg = gradients(k, j, torch.zeros_like(k), torch.ones(6))["dg"]
    assert bool((dg != 0).any()) == within


def test_a_tie_gives_the_gradient_to_the_gate() -> None:
    """g = -log rho to the last bit: not active, so only g gets a gradient."""
    size = 16
    k = F.normalize(normal(30, size, seed=50), dim=-1)
    j = F.normalize(normal(30, size, seed=51), dim=-1)
    g = -log_rho(k, j).expand(30, size)
    got = gradients(k, j, g, torch.ones(30))
    assert bool((got["dg"] != 0).all())
