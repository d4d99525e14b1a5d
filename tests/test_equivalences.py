"""Variants that are special cases of one another, outputs, final state and gradients.

Both sides start from the same leaves; autograd carries the gradients of the right side back through the mapping, so a
wrong chain rule shows like a wrong value. Where a mapping makes key-like streams differ by value head (`b = beta k`),
they are repeated to HV first.
"""

from __future__ import annotations

from collections.abc import Callable

import metrics
import pytest
import torch
import torch.nn.functional as F
from inputs import REGIMES, make
from oracles import ORACLES, clipped_gate, comba_closed_loop, names
from torch import Tensor

from dplrgen import ops

torch.set_num_threads(1)

F32, F64 = torch.float32, torch.float64
LIMIT = {F64: 1e-10, F32: 2e-5}
GATE_LIMIT = {F64: 1e-9, F32: 2e-4}
SIZES = {"groups-1": (2, 71, 2, 2, 20, 28), "groups-2": (1, 83, 1, 2, 24, 18)}

Mapping = Callable[..., tuple[Tensor, ...]]


def spread(key_like: Tensor, head_like: Tensor) -> Tensor:
    """Repeats the H heads of a stream to the HV heads of another."""
    return key_like.repeat_interleave(head_like.shape[2] // key_like.shape[2], dim=2)


def per_row(gate: Tensor) -> Tensor:
    return gate.unsqueeze(-1)


def per_channel(gate: Tensor, size: int) -> Tensor:
    return gate.unsqueeze(-1).expand(*gate.shape, size)


def kda_as_dplr(q, k, v, g, beta):
    q, k, beta = spread(q, v), spread(k, v), per_row(beta)
    return q, k, beta * v, k, beta * k, g


def gdn_as_kda(q, k, v, g, beta):
    return q, k, v, per_channel(g, k.shape[-1]), beta


def gdn_as_dplr(q, k, v, g, beta):
    return kda_as_dplr(*gdn_as_kda(q, k, v, g, beta))


def absorbed_as_dplr(q, k, v, a, d, g):
    return spread(q, v), spread(k, v), v, spread(a, v), spread(d, v) * torch.exp(-g), g


def dplr_as_absorbed(q, k, v, a, b, g):
    return spread(q, v), spread(k, v), v, spread(a, v), spread(b, v) * torch.exp(g), g


def gdn2_as_dplr(q, k, v, e, w, g):
    k = spread(k, v)
    return spread(q, v), k, w * v, k, e * k, g


def delta_as_gdn(q, k, v, beta):
    return q, k, v, torch.zeros_like(beta), beta


def simple_gla_as_gla(q, k, v, g):
    return q, k, v, per_channel(g, k.shape[-1])


def gla_as_dplr(q, k, v, g):
    a = F.normalize(torch.randn(k.shape, generator=torch.Generator().manual_seed(0)), dim=-1).to(k.dtype)
    return q, k, v, a, torch.zeros_like(k), g


def rwkv7_as_absorbed(q, k, v, a, b, g):
    return q, k, v, b, -a, g


def comba_as_dplr(q, k, v, p, g, beta):
    q, k, p, beta = spread(q, v), spread(k, v), spread(p, v), per_row(beta)
    return q, k, beta * v, k, beta * p, per_channel(g, k.shape[-1])


def clipped_as_dplr(q, k, j, v, g, eta):
    q, k, j, eta = spread(q, v), spread(k, v), spread(j, v), per_row(eta)
    return q, k, eta * v, j, eta * k, clipped_gate(g, eta * k, j)


# left, right, the right side's streams from the left side's, the regimes where the mapping loses nothing to rounding
EQUIVALENCES: list[tuple[str, str, Mapping, tuple[str, ...]]] = [
    ("kda", "dplr", kda_as_dplr, REGIMES),
    ("gdn", "kda", gdn_as_kda, REGIMES),
    ("gdn", "dplr", gdn_as_dplr, ("mild",)),
    ("dplr_absorbed", "dplr", absorbed_as_dplr, ("weak", "mild", "zero")),
    ("dplr", "dplr_absorbed", dplr_as_absorbed, ("weak", "mild", "zero", "spikes")),
    ("gdn2", "dplr", gdn2_as_dplr, ("mild", "spikes")),
    ("delta", "gdn", delta_as_gdn, ("zero",)),
    ("simple_gla", "gla", simple_gla_as_gla, REGIMES),
    ("gla", "dplr", gla_as_dplr, REGIMES),
    ("rwkv7", "dplr_absorbed", rwkv7_as_absorbed, REGIMES),
    ("comba", "dplr", comba_as_dplr, ("mild", "zero")),
]


def both_ways(
    left: str, right: Callable[..., tuple[Tensor, Tensor]], mapping: Mapping, streams: list[Tensor], h0, do, dht
) -> tuple[metrics.Result, metrics.Result]:
    def mapped(*xs, scale, initial_state):
        return right(*mapping(*xs), scale=scale, initial_state=initial_state)

    mine = metrics.run(getattr(ops, left), left, streams, h0, do, dht)
    return mine, metrics.collect(mapped, left, streams, h0, do, dht)


def with_state(name: str):
    def op(*streams, **options):
        return getattr(ops, name)(*streams, output_final_state=True, **options)

    return op


def assert_close(mine: metrics.Result, other: metrics.Result, dtype: torch.dtype, factor: float = 1.0) -> None:
    assert mine.keys() == other.keys()
    q_dq = metrics.rms(mine["dq"])
    for key in mine:
        limit = factor * (GATE_LIMIT if key[1:] in metrics.GATES else LIMIT)[dtype]
        # A gate's gradient that cancels, as at strong decay, is compared at the size of the terms.
        slack = metrics.GATE_SLACK[dtype] * q_dq if key == "dg" else 0.0
        error, size = metrics.rms(mine[key].double() - other[key].double()), metrics.rms(other[key])
        assert error <= limit * size + slack, f"{key}: rr {error / max(size, 1e-300):.2e}, limit {limit:.0e}"


def cases():
    for left, right, mapping, regimes in EQUIVALENCES:
        for regime in regimes:
            for label, sizes in SIZES.items():
                yield pytest.param(left, right, mapping, regime, sizes, id=f"{left}={right}-{regime}-{label}")


@pytest.mark.parametrize("dtype", [F64, F32], ids=["float64", "float32"])
@pytest.mark.parametrize(("left", "right", "mapping", "regime", "sizes"), list(cases()))
def test_special_case(left: str, right: str, mapping: Mapping, regime: str, sizes, dtype: torch.dtype) -> None:
    streams, h0, do, dht = make(left, *sizes, dtype, regime=regime, seed=20)
    assert_close(*both_ways(left, with_state(right), mapping, streams, h0, do, dht), dtype)


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("regime", ["weak", "mild", "zero", "spikes"])
@pytest.mark.parametrize("dtype", [F64, F32], ids=["float64", "float32"])
def test_clipped_is_dplr_with_the_clipped_gate(dtype: torch.dtype, regime: str, sizes) -> None:
    streams, h0, do, dht = make("gdn2_clipped", *sizes, dtype, regime=regime, seed=21)
    mine, other = both_ways("gdn2_clipped", with_state("dplr"), clipped_as_dplr, streams, h0, do, dht)
    assert_close(mine, other, dtype, factor=1.0 if dtype == F64 else 5.0)


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("regime", ["mild", "zero", "spikes"])
@pytest.mark.parametrize("dtype", [F64, F32], ids=["float64", "float32"])
def test_clipped_with_unit_keys_never_clips(dtype: torch.dtype, regime: str, sizes) -> None:
    """j = k, |k| = 1, eta anywhere in [0, 2], both ends included: kda with beta = eta, the gate's gradient too."""
    (q, k, v, g, beta), h0, do, dht = make("kda", *sizes, dtype, regime=regime, seed=22)
    with torch.no_grad():
        beta.mul_(2)
        beta[:, ::5], beta[:, 1::5] = 2.0, 0.0

    def clipped(q, k, v, g, eta, **options):
        return ops.gdn2_clipped(q, k, k, v, g, eta, output_final_state=True, **options)

    mine = metrics.collect(clipped, "kda", [q, k, v, g, beta], h0, do, dht)
    other = metrics.run(ops.kda, "kda", [q, k, v, g, beta], h0, do, dht)
    assert metrics.rms(other["dg"]) > 0.01
    assert_close(mine, other, dtype)


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("dtype", [F64, F32], ids=["float64", "float32"])
@pytest.mark.parametrize("regime", ["mild", "spikes"])
def test_gdn2_with_equal_gates_is_kda(regime: str, dtype: torch.dtype, sizes) -> None:
    streams, h0, do, dht = make("kda", *sizes, dtype, regime=regime, seed=23)

    def equal_gates(q, k, v, g, beta):
        return q, k, v, per_channel(beta, k.shape[-1]), per_channel(beta, v.shape[-1]), g

    assert_close(*both_ways("kda", with_state("gdn2"), equal_gates, streams, h0, do, dht), dtype)


@pytest.mark.parametrize("dtype", [F64, F32], ids=["float64", "float32"])
def test_comba_with_p_equal_k_is_gdn(dtype: torch.dtype) -> None:
    streams, h0, do, dht = make("gdn", 2, 71, 2, 4, 20, 28, dtype, seed=24)

    def own_key(q, k, v, g, beta):
        return q, k, v, k, g, beta

    assert_close(*both_ways("gdn", with_state("comba"), own_key, streams, h0, do, dht), dtype)


def test_comba_of_the_paper_is_comba_with_p_over_alpha() -> None:
    """The paper's feedback reads the state before the decay; dividing p by the decay gives that form."""
    streams, h0, do, dht = make("comba", 2, 37, 2, 2, 16, 24, F64, seed=25)

    def before_decay(q, k, v, p, g, beta):
        return q, k, v, p * torch.exp(-per_row(g)), g, beta

    mapped, _ = both_ways("comba", with_state("comba"), before_decay, streams, h0, do, dht)[::-1]
    assert_close(mapped, metrics.collect(comba_closed_loop, "comba", streams, h0, do, dht), F64)


def test_no_erase_term_leaves_no_gradient_for_its_direction() -> None:
    """dplr at b = 0: da is exactly 0, db is not."""
    streams, h0, do, dht = make("dplr", 1, 40, 1, 2, 16, 24, F64, seed=26)
    streams[4] = torch.zeros_like(streams[4]).requires_grad_()
    got = metrics.run(ops.dplr, "dplr", streams, h0, do, dht)
    assert not got["da"].any()
    assert metrics.rms(got["db"]) > 1e-3


@pytest.mark.parametrize("dtype", [F64, F32], ids=["float64", "float32"])
@pytest.mark.parametrize("places", ["everywhere", "one token", "one channel", "first of a chunk"])
def test_absorbed_where_the_decay_underflows(dtype: torch.dtype, places: str) -> None:
    """g = -1e4: alpha is 0 and b = d / alpha does not exist, the absorbed form does; with its erase term d kept."""
    streams, h0, do, dht = make("dplr_absorbed", 1, 75, 1, 2, 16, 24, dtype, seed=27)
    at = {n: i for i, n in enumerate(names("dplr_absorbed"))}
    g = streams[at["g"]].detach()
    where = {
        "everywhere": (slice(None),),
        "one token": (slice(None), 30),
        "one channel": (..., 5),
        "first of a chunk": (slice(None), slice(None, None, 16)),
    }[places]
    g[where] = -1e4
    ref = metrics.reference("dplr_absorbed", streams, h0, do, dht)
    got = metrics.run(ops.dplr_absorbed, "dplr_absorbed", streams, h0, do, dht)
    failures = metrics.check("dplr_absorbed", got, ref, dtype, streams)
    assert not failures, "\n".join(failures)

    # The erase term must still act: without it the outputs are others.
    without = list(streams)
    without[at["d"]] = torch.zeros_like(without[at["d"]])
    with torch.no_grad():
        o, _ = ops.dplr_absorbed(*without, initial_state=h0)
    assert metrics.rr(o, ref["o"]) > 1e-2


@pytest.mark.parametrize("name", ORACLES)
def test_value_heads_share_a_key_head(name: str) -> None:
    """HV = 3 H equals the call with key-like streams repeated, gradients summed over each group."""
    streams, h0, do, dht = make(name, 1, 39, 2, 6, 16, 18, F64, seed=28)

    def repeated(*xs):
        return tuple(spread(x, do) for x in xs)

    assert_close(*both_ways(name, with_state(name), repeated, streams, h0, do, dht), F64)


@pytest.mark.parametrize("name", ORACLES)
def test_batch_elements_and_heads_are_independent(name: str) -> None:
    """One (batch, head) alone gives what it gives in company."""
    streams, h0, do, dht = make(name, 3, 35, 2, 4, 16, 18, F64, seed=29)
    whole = metrics.run(getattr(ops, name), name, streams, h0, do, dht)
    head, group = 1, slice(2, 4)

    def cut(x: Tensor) -> Tensor:
        return x[1:2, :, head : head + 1] if x.shape[2] == 2 else x[1:2, :, group]

    alone = metrics.run(
        getattr(ops, name),
        name,
        [cut(x).detach().requires_grad_() for x in streams],
        h0[1:2, group].detach().requires_grad_(),
        cut(do),
        dht[1:2, group],
    )
    for key, x in alone.items():
        part = whole[key][1:2, group] if key in ("ht", "dh0") else cut(whole[key])
        assert metrics.rr(part, x) < 1e-11, key
