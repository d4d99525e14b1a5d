"""Every op of the API on the CPU against its float64 token loop: outputs, final state and every gradient."""

from __future__ import annotations

import itertools

import metrics
import pytest
import torch
from inputs import REGIMES, erases_freely, has_gate, make
from oracles import ORACLES, names

from dplrgen import ops

torch.set_num_threads(1)

F32, F64, BF16, F16 = torch.float32, torch.float64, torch.bfloat16, torch.float16
GATED = [n for n in ORACLES if has_gate(n)]

# B, T, H, HV, K, V: no two sizes of a shape alike but H and HV, tails of every kind, head sizes off the powers of two.
SHAPES = [
    (2, 77, 3, 6, 20, 36),
    (1, 131, 2, 2, 36, 24),
    (3, 1, 1, 2, 16, 40),
    (2, 64, 1, 3, 48, 18),
    (1, 65, 2, 4, 24, 17),
    (4, 63, 3, 3, 17, 32),
    (2, 33, 1, 1, 64, 16),
    (1, 16, 2, 4, 18, 100),
    (1, 34, 2, 4, 20, 512),
    (2, 35, 1, 3, 1, 3),
]


def shape_id(shape: tuple[int, ...]) -> str:
    return "B{}-T{}-H{}-HV{}-K{}-V{}".format(*shape)


def assert_matches(name: str, shape: tuple[int, ...], dtype: torch.dtype, scale: float | None = None, **law) -> None:
    streams, h0, do, dht = make(name, *shape, dtype, **law)
    got = metrics.run(getattr(ops, name), name, streams, h0, do, dht, scale)
    ref = metrics.reference(name, streams, h0, do, dht, scale)
    assert got["o"].dtype == dtype
    assert got["ht"].dtype == (F64 if dtype == F64 else F32)
    leaves = dict(zip([f"d{n}" for n in names(name)], streams, strict=True)) | ({} if h0 is None else {"dh0": h0})
    assert {k: got[k].dtype for k in leaves} == {k: x.dtype for k, x in leaves.items()}
    failures = metrics.check(name, got, ref, dtype, streams)
    assert not failures, "\n".join(failures)


@pytest.mark.parametrize("state", [True, False], ids=["state", "no-state"])
@pytest.mark.parametrize("shape", SHAPES, ids=shape_id)
@pytest.mark.parametrize("name", ORACLES)
def test_shapes(name: str, shape: tuple[int, ...], state: bool) -> None:
    assert_matches(name, shape, F32, state=state, seed=1)


def regime_cases():
    """Every variant, regime and dtype, the shapes and the presence of a state going round."""
    turn = itertools.count()
    for name, dtype in itertools.product(ORACLES, (F32, F64, BF16, F16)):
        for regime in REGIMES if has_gate(name) else ("zero",):
            i = next(turn)
            label = f"{name}-{str(dtype).removeprefix('torch.')}-{regime}"
            yield pytest.param(name, SHAPES[i % len(SHAPES)], dtype, regime, i % 3 > 0, id=label)


@pytest.mark.parametrize(("name", "shape", "dtype", "regime", "state"), list(regime_cases()))
def test_regimes_and_dtypes(name: str, shape: tuple[int, ...], dtype: torch.dtype, regime: str, state: bool) -> None:
    assert_matches(name, shape, dtype, regime=regime, state=state, seed=2)


@pytest.mark.parametrize("regime", ["mild", "strong"])
@pytest.mark.parametrize("name", GATED)
def test_float32_gates_beside_bfloat16(name: str, regime: str) -> None:
    assert_matches(name, (2, 77, 1, 2, 24, 36), BF16, gate_dtype=F32, regime=regime, seed=3)


@pytest.mark.parametrize("name", [n for n in ORACLES if erases_freely(n)])
def test_transitions_that_expand(name: str) -> None:
    assert_matches(name, (1, 150, 2, 4, 20, 36), F32, regime="expand", seed=4)


@pytest.mark.parametrize("scale", [1, 0.3])
@pytest.mark.parametrize("name", ORACLES)
def test_scale(name: str, scale: float) -> None:
    assert_matches(name, (2, 21, 1, 2, 16, 24), F32, scale=scale, seed=5)


@pytest.mark.parametrize("name", ORACLES)
def test_every_tail(name: str) -> None:
    """T from one token to past a chunk's end; the short ones are where padding reaches the result."""
    for tokens in (2, 3, 15, 17, 31, 47, 66, 127, 129):
        assert_matches(name, (1, tokens, 1, 2, 16, 18), F32, seed=tokens)


@pytest.mark.parametrize("name", ORACLES)
def test_gradients_from_either_output_alone(name: str) -> None:
    streams, h0, do, dht = make(name, 1, 41, 1, 2, 16, 24, F64, seed=6)
    op = getattr(ops, name)
    parts = []
    for use_do, use_dht in ((True, False), (False, True), (True, True)):
        given = (do if use_do else None, dht if use_dht else None)
        got = metrics.run(op, name, streams, h0, *given)
        failures = metrics.check(name, got, metrics.reference(name, streams, h0, *given), F64, streams)
        assert not failures, "\n".join(failures)
        parts.append(got)
    only_o, only_ht, both = parts
    for key in both:
        if key not in ("o", "ht"):
            assert metrics.rr(only_o[key] + only_ht[key], both[key]) < 1e-12, key


@pytest.mark.parametrize("name", ORACLES)
def test_no_final_state_unless_asked_for(name: str) -> None:
    streams, h0, do, _ = make(name, 1, 35, 1, 2, 16, 24, F32, seed=7)
    got = metrics.collect(getattr(ops, name), name, streams, h0, do, None)
    assert "ht" not in got
    ref = metrics.reference(name, streams, h0, do, None)
    del ref["ht"]
    failures = metrics.check(name, got, ref, F32, streams)
    assert not failures, "\n".join(failures)


@pytest.mark.parametrize("name", ORACLES)
def test_a_sequence_cut_in_two_is_the_same_sequence(name: str) -> None:
    """The final state of the first part carried into the second, gradients through it included."""
    streams, h0, do, dht = make(name, 2, 83, 1, 2, 16, 24, F64, seed=8)
    op = getattr(ops, name)

    def in_two(*xs, scale, initial_state, output_final_state):
        first, carried = op(*(x[:, :37] for x in xs), scale=scale, initial_state=initial_state, output_final_state=True)
        second, last = op(*(x[:, 37:] for x in xs), scale=scale, initial_state=carried, output_final_state=True)
        return torch.cat([first, second], dim=1), last

    whole = metrics.run(op, name, streams, h0, do, dht)
    cut = metrics.run(in_two, name, streams, h0, do, dht)
    figures = metrics.worst(cut, whole)
    assert max(figures.values()) < 1e-11, figures


@pytest.mark.parametrize("name", GATED)
def test_gates_above_zero_follow_the_formula(name: str) -> None:
    """g > 0 while the run sums stay small; a growing state, so float32 only."""
    streams, h0, do, dht = make(name, 1, 64, 1, 2, 16, 24, F32, regime="weak", seed=9)
    at = names(name).index("g")
    streams[at] = (0.02 - streams[at].detach()).requires_grad_()
    got = metrics.run(getattr(ops, name), name, streams, h0, do, dht)
    failures = metrics.check(name, got, metrics.reference(name, streams, h0, do, dht), F32, streams)
    assert not failures, "\n".join(failures)


@pytest.mark.parametrize("name", [n for n in GATED if n != "gdn2_clipped"])
def test_gates_far_above_zero_are_right_or_not_finite(name: str) -> None:
    """A run sum beyond 80 in a chunk may overflow; what comes out finite must still be right."""
    streams, h0, _, _ = make(name, 1, 64, 1, 2, 16, 24, F32, regime="zero", seed=10)
    at = names(name).index("g")
    streams[at] = torch.full_like(streams[at], 3.0)
    with torch.no_grad():
        o, ht = getattr(ops, name)(*streams, initial_state=h0, output_final_state=True)
        want_o, want_ht = ORACLES[name](*streams, initial_state=h0)
    for got, want in ((o, want_o), (ht, want_ht)):
        rows = torch.isfinite(got).all(-1)
        error = (got.double() - want).norm(dim=-1)
        assert bool((error[rows] <= 1e-3 * want.norm(dim=-1)[rows]).all())


@pytest.mark.parametrize("name", ["kda", "dplr", "gdn2_clipped"])
def test_gradcheck(name: str) -> None:
    streams, h0, _, _ = make(name, 1, 19, 1, 2, 16, 17, F64, seed=11)
    op = getattr(ops, name)

    def outputs(*xs):
        return op(*xs[:-1], initial_state=xs[-1], output_final_state=True)

    assert torch.autograd.gradcheck(outputs, (*streams, h0), fast_mode=True, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("name", ["kda", "dplr", "gdn2_clipped"])
def test_gradcheck_element_by_element(name: str) -> None:
    """Of every stream; the state, the largest input, is left to the test above."""
    streams, h0, _, _ = make(name, 1, 2, 1, 1, 16, 16, F64, seed=12)
    op = getattr(ops, name)
    leaves = [*streams, h0]

    for i, stream in enumerate(names(name)):
        held = [x.detach() if n != i else x for n, x in enumerate(leaves)]

        def outputs(x, i=i, held=held):
            xs = [*held[:i], x, *held[i + 1 :]]
            o, ht = op(*xs[:-1], initial_state=xs[-1], output_final_state=True)
            return o.sum((1, 2)), ht.sum(-1)

        assert torch.autograd.gradcheck(outputs, (leaves[i],), atol=1e-6, rtol=1e-5), stream


@pytest.mark.parametrize("name", ORACLES)
def test_the_result_does_not_depend_on_the_future(name: str) -> None:
    """Bit for bit: what comes after a token changes nothing at it."""
    streams, h0, _, _ = make(name, 1, 90, 1, 2, 16, 24, F32, seed=13)
    op = getattr(ops, name)
    with torch.no_grad():
        before, _ = op(*streams, initial_state=h0)
        changed = [x.detach().clone() for x in streams]
        for x in changed:
            x[:, 70:] = 0.5 * x[:, 70:].flip(1)
        after, _ = op(*changed, initial_state=h0)
    assert torch.equal(before[:, :70], after[:, :70])
    assert not torch.equal(before[:, 70:], after[:, 70:])


@pytest.mark.parametrize("name", ORACLES)
def test_repeatable_and_inputs_untouched(name: str) -> None:
    streams, h0, do, dht = make(name, 2, 45, 1, 2, 16, 24, F32, seed=14)
    kept = [x.detach().clone() for x in (*streams, h0, do, dht)]
    op = getattr(ops, name)
    first = metrics.run(op, name, streams, h0, do, dht)
    second = metrics.run(op, name, streams, h0, do, dht)
    assert all(torch.equal(first[key], second[key]) for key in first)
    assert all(torch.equal(x, y) for x, y in zip((*streams, h0, do, dht), kept, strict=True))
