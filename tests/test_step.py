"""The token step: one token a row against the float64 loop, the chunked op, and in place in a pool of states."""

from __future__ import annotations

import importlib
import inspect
import json
import os
import subprocess
import sys

import metrics
import pytest
import torch
from inputs import make
from oracles import ORACLES, computing_eps, names

import dplrgen
from dplrgen import ops

B, H, HV, K, V = 3, 2, 4, 10, 14
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def step_inputs(name: str, dtype: torch.dtype, regime: str = "mild", seed: int = 95, tokens: int = 1):
    streams, h0, *_ = make(name, B, tokens, H, HV, K, V, dtype, regime=regime, seed=seed)
    return [x.detach() for x in streams], h0.detach()


def token(streams, t: int = 0):
    return [x[:, t] for x in streams]


@pytest.mark.parametrize("regime", ["mild", "strong", "spikes", "zero"])
@pytest.mark.parametrize("dtype", [torch.float64, *DTYPES], ids=str)
@pytest.mark.parametrize("name", ORACLES)
def test_a_token_equals_the_loop(name: str, dtype: torch.dtype, regime: str) -> None:
    streams, h0 = step_inputs(name, dtype, regime)
    before = h0.clone()
    o, state = getattr(ops, f"{name}_step")(*token(streams), h0, scale=0.3)
    want, ht = ORACLES[name](*(x.double() for x in streams), scale=0.3, initial_state=h0, eps=computing_eps(dtype))
    assert torch.equal(h0, before)
    assert (o.dtype, state.dtype) == (dtype, h0.dtype)
    tight = 1e-12 if dtype == torch.float64 else 1e-6
    assert metrics.rr(state, ht) < tight
    assert metrics.rr(o, want[:, 0]) < max(tight, torch.finfo(dtype).eps)


@pytest.mark.parametrize("name", ORACLES)
def test_a_thousand_steps_equal_the_chunked_op(name: str) -> None:
    """bfloat16 streams, float32 state: the state loses nothing to the streams' dtype on its way."""
    streams, h0 = step_inputs(name, torch.bfloat16, tokens=1000)
    step, state = getattr(ops, f"{name}_step"), h0.clone()
    rows = []
    for t in range(1000):
        o, same = step(*token(streams, t), state, inplace=True)
        assert same is state
        rows.append(o)
    want, ht = getattr(ops, name)(*(x.float() for x in streams), initial_state=h0, output_final_state=True)
    assert metrics.rr(state, ht) < 1e-5
    assert metrics.rr(torch.stack(rows, 1), want) < 5e-3


@pytest.mark.parametrize("name", ORACLES)
def test_in_place_and_by_slot_are_the_same_step(name: str) -> None:
    """Padding rows, with a negative slot or one past the pool, read and write nothing; slot 0 is like any other."""
    step = getattr(ops, f"{name}_step")
    streams, h0 = step_inputs(name, torch.float32)
    want, after = step(*token(streams), h0)
    state = h0.clone()
    o, same = step(*token(streams), state, inplace=True)
    assert same is state
    assert torch.equal(o, want)
    assert torch.equal(state, after)

    for index in (torch.int32, torch.int64):
        pool = torch.randn(8, HV, K, V, generator=torch.Generator().manual_seed(96))
        slots = [0, -1, 5]
        pool[[0, 5]] = h0[[0, 2]]
        before = pool.clone()
        o, same = step(*token(streams), pool, inplace=True, state_indices=torch.tensor(slots, dtype=index))
        assert same is pool
        assert torch.equal(o[[0, 2]], want[[0, 2]])
        assert (o[1] == 0).all()
        assert torch.equal(pool[[0, 5]], after[[0, 2]])
        others = [1, 2, 3, 4, 6, 7]
        assert torch.equal(pool[others], before[others])
        o, _ = step(*token(streams), pool, inplace=True, state_indices=torch.tensor([8, 2**31 - 1, -(2**31)]))
        assert (o == 0).all()
        assert torch.equal(pool[others], before[others])


@pytest.mark.parametrize("name", ORACLES)
def test_a_row_knows_nothing_of_its_neighbours(name: str) -> None:
    step = getattr(ops, f"{name}_step")
    streams, h0 = step_inputs(name, torch.float32)
    want, after = step(*token(streams), h0)
    for fill in (float("nan"), 1e30):
        other = [x.clone() for x in token(streams)]
        state = h0.clone()
        for x in (*other, state):
            x[1:] = fill
        o, got = step(*other, state)
        assert torch.equal(o[0], want[0])
        assert torch.equal(got[0], after[0])


@pytest.mark.parametrize("name", ORACLES)
def test_strides_change_nothing(name: str) -> None:
    step = getattr(ops, f"{name}_step")
    streams, h0 = step_inputs(name, torch.float32)
    want, after = step(*token(streams), h0)
    views = [torch.stack([x, x.new_full(x.shape, float("nan"))], -1)[..., 0] for x in token(streams)]
    state = torch.full((HV, V, K + 1, B), float("nan")).permute(3, 0, 2, 1)[:, :, :K]
    state.copy_(h0)
    o, got = step(*views, state)
    assert o.is_contiguous()
    assert got.is_contiguous()
    assert torch.equal(o, want)
    assert torch.equal(got, after)
    o, got = step(*views, state, inplace=True)
    assert torch.equal(o, want)
    assert torch.equal(state, after)


def test_a_step_in_place_is_seen_by_autograd() -> None:
    """A state kept for a backward and then stepped in place is an error there, not another gradient."""
    streams, h0 = step_inputs("kda", torch.float32, tokens=2)
    version = h0._version
    ops.kda_step(*token(streams), h0, inplace=True)
    assert h0._version > version


def test_overlapping_states_are_refused_in_place() -> None:
    streams, _ = step_inputs("kda", torch.float32)
    rows = torch.zeros(5000).as_strided((B, HV, K, V), (70, K * V, V, 1))
    with pytest.raises(ValueError, match="overlap"):
        ops.kda_step(*token(streams), rows, inplace=True)
    apart = torch.zeros(5000).as_strided((B, HV, K, V), (1, 3, 12, 120))
    ops.kda_step(*token(streams), apart, inplace=True)


def test_where_alpha_is_zero_nothing_is_divided() -> None:
    streams, h0 = step_inputs("dplr_absorbed", torch.float32)
    streams[-1].fill_(-1e4)
    o, state = ops.dplr_absorbed_step(*token(streams), h0)
    want, ht = ORACLES["dplr_absorbed"](*streams, initial_state=h0)
    assert metrics.rr(o, want[:, 0]) < 1e-6
    assert metrics.rr(state, ht) < 1e-6


@pytest.mark.parametrize("name", ORACLES)
def test_opcheck(name: str) -> None:
    module = importlib.import_module(f"dplrgen.generated.{name}")
    streams, h0 = step_inputs(name, torch.float32)
    torch.library.opcheck(module._STEP_OP, (*token(streams), h0, 0.5))
    slots = torch.tensor([2, -1, 0])
    torch.library.opcheck(module._STEP_IN_PLACE_OP, (*token(streams), h0.clone(), slots, 0.5))


@pytest.mark.parametrize("name", ["kda", "gdn2_clipped"])
def test_compiles_whole(name: str) -> None:
    step = getattr(ops, f"{name}_step")
    streams, h0 = step_inputs(name, torch.float32)
    want, after = step(*token(streams), h0)

    def two(state: torch.Tensor) -> torch.Tensor:
        o, _ = step(*token(streams), state, inplace=True)
        return o

    state = h0.clone()
    o = torch.compile(two, fullgraph=True, backend="aot_eager")(state)
    assert torch.equal(o, want)
    assert torch.equal(state, after)


def test_no_rows() -> None:
    streams, h0 = step_inputs("kda", torch.float32)
    o, state = ops.kda_step(*(x[:0] for x in token(streams)), h0[:0])
    assert (o.shape, state.shape) == ((0, HV, V), (0, HV, K, V))


def bad_calls():
    streams, h0 = step_inputs("kda", torch.bfloat16)
    q, k, v, g, beta = token(streams)
    good = (q, k, v, g, beta)
    slots = torch.tensor([0, 1, 2])
    yield (*streams, h0), {}, ValueError, "q must have shape [B, H, K], got [3, 1, 2, 10]"
    yield (q, k, v, g[:2], beta, h0), {}, ValueError, "g must have shape [B, HV, K] = [3, 4, 10], got [2, 4, 10]"
    yield (*good, None), {}, TypeError, "state must be a tensor, got NoneType"
    yield (*good, h0.bfloat16()), {}, TypeError, "state must have dtype torch.float32, got torch.bfloat16"
    yield (*good, h0[:2]), {}, ValueError, "state must have shape [B, HV, K, V] = [3, 4, 10, 14], got [2, 4, 10, 14]"
    yield (*good, h0.mT), {}, ValueError, "state must have shape [B, HV, K, V] = [3, 4, 10, 14], got [3, 4, 14, 10]"
    yield (*good, h0), {"scale": "1"}, TypeError, "scale must be a number or None, got str"
    yield (
        (*good, h0),
        {"state_indices": slots},
        ValueError,
        "state_indices needs inplace=True: a pool is updated where it is",
    )
    options = {"inplace": True}
    wrong = slots.float()
    text = "state_indices must have dtype torch.int32 or torch.int64, got torch.float32"
    yield (*good, h0), {**options, "state_indices": wrong}, TypeError, text
    text = "state_indices must have shape [B] = [3], got [2]"
    yield (*good, h0), {**options, "state_indices": slots[:2]}, ValueError, text
    yield (
        (*good, h0),
        {**options, "state_indices": [0, 1, 2]},
        TypeError,
        "state_indices must be a tensor or None, got list",
    )
    text = "state_indices must not name a slot twice"
    yield (*good, h0), {**options, "state_indices": torch.tensor([1, 1, 0]), "check": True}, ValueError, text
    text = "state must not overlap itself with inplace=True, got strides [0, 140, 14, 1]"
    yield (*good, h0[:1].expand(3, -1, -1, -1)), options, ValueError, text
    text = "kda_step has no gradients: call it under torch.no_grad(), or kda with T = 1"
    yield (q.clone().requires_grad_(), *good[1:], h0), {}, NotImplementedError, text
    yield (q, k, v, g * float("inf"), beta, h0), {"check": True}, ValueError, "g must be finite, found inf or nan"
    yield (q.long(), *good[1:], h0), {}, TypeError, None


@pytest.mark.parametrize("call", list(bad_calls()), ids=lambda c: str(c[3])[:40])
def test_bad_arguments_are_named_and_nothing_is_written(call) -> None:
    args, options, kind, text = call
    state = args[-1]
    before = state.clone() if isinstance(state, torch.Tensor) else None
    with pytest.raises(kind) as caught:
        ops.kda_step(*args, **options)
    assert text is None or str(caught.value) == text
    assert before is None or torch.equal(state, before)
    with pytest.raises(TypeError, match="inplce"):
        ops.kda_step(*args, inplce=True)


@pytest.mark.parametrize("name", ORACLES)
def test_the_signature_is_that_of_the_op(name: str) -> None:
    step = getattr(ops, f"{name}_step")
    parameters = inspect.signature(step).parameters
    assert tuple(parameters)[: len(names(name)) + 1] == (*names(name), "state")
    assert all(p.kind is p.KEYWORD_ONLY for p in list(parameters.values())[len(names(name)) + 1 :])
    assert getattr(ops, name).step is step


def test_a_built_variant_has_its_step() -> None:
    op = dplrgen.build(dplrgen.VARIANTS["kda"].renamed("mine"))
    streams, h0 = step_inputs("kda", torch.float32)
    assert torch.equal(op.step(*token(streams), h0)[0], ops.kda_step(*token(streams), h0)[0])


INTERPRETED = """
import importlib, json, sys, torch
from inputs import make
import metrics
from oracles import ORACLES
worst = {}
for name in ORACLES:
    module = importlib.import_module(f"dplrgen.generated.{name}")
    worst[name] = []
    for dtype, K, V in ((torch.float32, 20, 24), (torch.float16, 33, 18)):
        streams, h0, *_ = make(name, 3, 1, 2, 4, K, V, dtype, seed=97)
        streams, h0 = [x.detach() for x in streams], h0.detach()
        want, ht = ORACLES[name](*(x.double() for x in streams), initial_state=h0, eps=torch.finfo(torch.float32).eps)
        token = [x[:, 0] for x in streams]
        state = torch.full((4, V, K + 1, 3), float("nan")).permute(3, 0, 2, 1)[:, :, :K]
        state.copy_(h0)
        o = module._step_triton(*token, state, state, None, K**-0.5)
        worst[name] += [metrics.rr(o, want[:, 0]) / torch.finfo(dtype).eps / 1e4, metrics.rr(state, ht) * 1e3]
        pool = torch.zeros(5, 4, K, V)
        pool[[4, 0]] = h0[:2]
        before = pool.clone()
        slots = torch.tensor([[4, 1], [0, 1], [-1, 1]], dtype=torch.int32)[:, 0]
        again = module._step_triton(*token, pool, pool, slots, K**-0.5)
        same = torch.equal(again[:2], o[:2]) and (again[2] == 0).all() and torch.equal(pool[[4, 0]], state[:2])
        worst[name].append(0.0 if same and torch.equal(pool[1:4], before[1:4]) else 1.0)
print(json.dumps(worst))
"""


def test_kernels_in_the_interpreter() -> None:
    pytest.importorskip("triton", reason="the interpreter is part of triton")
    here = os.path.dirname(__file__)
    environment = {
        **os.environ,
        "TRITON_INTERPRET": "1",
        "PYTHONPATH": os.pathsep.join([here, *filter(None, sys.path)]),
    }
    done = subprocess.run(
        [sys.executable, "-c", INTERPRETED], capture_output=True, text=True, env=environment, timeout=600
    )
    assert done.returncode == 0, done.stderr[-3000:]
    worst = json.loads(done.stdout.splitlines()[-1])
    assert worst.keys() == ORACLES.keys()
    assert {name: x for name, x in worst.items() if max(x) > 1e-3} == {}
