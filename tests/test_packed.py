"""Packed sequences: one call with cu_seqlens equals a call a sequence, to the bit, forward and backward."""

from __future__ import annotations

import itertools

import metrics
import pytest
import torch
from inputs import make
from oracles import ORACLES, names
from torch import Tensor

from dplrgen import ops

# Empty sequences at both ends and inside, a chunk exactly, several chunks, one token; then tokens of no sequence.
BOUNDS = (0, 0, 32, 33, 33, 110, 110)
T, H, HV, K, V = 117, 2, 4, 10, 14
PAIRS = list(itertools.pairwise(BOUNDS))
N = len(PAIRS)


def packed_inputs(name: str, dtype: torch.dtype, state: bool = True, seed: int = 90):
    """Streams of the packed row, states and cotangents of the N sequences."""
    streams, _, do, _ = make(name, 1, T, H, HV, K, V, dtype, state=False, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    h0, dht = torch.randn(2, N, HV, K, V, generator=generator, dtype=wide)
    return streams, h0.requires_grad_() if state else None, do, dht


def boundaries(dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor(BOUNDS, dtype=dtype)


def one_by_one(op, name: str, streams, h0, do, dht) -> metrics.Result:
    """A call a sequence, put together; zero where no sequence is."""
    whole = {
        "o": torch.zeros_like(do),
        **{f"d{n}": torch.zeros_like(x) for n, x in zip(names(name), streams, strict=True)},
    }
    states: dict[str, list[Tensor]] = {"ht": [], "dh0": []}
    for n, (start, end) in enumerate(PAIRS):
        own = [x[:, start:end].detach().requires_grad_() for x in streams]
        state = None if h0 is None else h0[n : n + 1].detach().requires_grad_()
        got = metrics.collect(op, name, own, state, do[:, start:end], dht[n : n + 1], output_final_state=True)
        for key, x in got.items():
            if key in states:
                states[key].append(x)
            else:
                whole[key][:, start:end] = x
    return whole | {key: torch.cat(parts) for key, parts in states.items() if parts}


@pytest.mark.parametrize("state", [True, False], ids=["state", "no-state"])
@pytest.mark.parametrize("name", ORACLES)
def test_packed_equals_a_call_a_sequence(name: str, state: bool) -> None:
    op = getattr(ops, name)
    streams, h0, do, dht = packed_inputs(name, torch.float32, state)
    got = metrics.collect(op, name, streams, h0, do, dht, output_final_state=True, cu_seqlens=boundaries())
    want = one_by_one(op, name, streams, h0, do, dht)
    assert got.keys() == want.keys()
    assert [key for key in want if not torch.equal(got[key], want[key])] == []


@pytest.mark.parametrize("name", ORACLES)
def test_packed_equals_the_token_loop(name: str) -> None:
    streams, h0, do, dht = packed_inputs(name, torch.float64)
    got = metrics.collect(
        getattr(ops, name), name, streams, h0, do, dht, output_final_state=True, cu_seqlens=boundaries(torch.int64)
    )

    def loop(*given, **options):
        options.pop("output_final_state")
        return ORACLES[name](*given, **options)

    want = one_by_one(loop, name, streams, h0, do, dht)
    assert {key: x for key in want if (x := metrics.rr(got[key], want[key])) > 1e-11} == {}


@pytest.mark.parametrize("name", ORACLES)
def test_an_empty_sequence_keeps_its_state(name: str) -> None:
    streams, h0, do, dht = packed_inputs(name, torch.float32)
    got = metrics.collect(
        getattr(ops, name), name, streams, h0, do, dht, output_final_state=True, cu_seqlens=boundaries()
    )
    for n in (n for n, (start, end) in enumerate(PAIRS) if start == end):
        assert torch.equal(got["ht"][n], h0[n])
        assert torch.equal(got["dh0"][n], dht[n])


@pytest.mark.parametrize("name", ORACLES)
def test_tokens_of_no_sequence_matter_to_nothing(name: str) -> None:
    """NaN past the last boundary changes no bit, and the results there are 0."""
    op = getattr(ops, name)
    streams, h0, do, dht = packed_inputs(name, torch.float32)
    options = {"output_final_state": True, "cu_seqlens": boundaries()}
    want = metrics.collect(op, name, streams, h0, do, dht, **options)
    with torch.no_grad():
        for x in (*streams, do):
            x[:, BOUNDS[-1] :] = float("nan")
    got = metrics.collect(op, name, streams, h0, do, dht, **options)
    assert [key for key in want if not torch.equal(got[key], want[key])] == []
    tokens = [key for key in want if key not in ("ht", "dh0")]
    assert [key for key in tokens if (got[key][:, BOUNDS[-1] :] != 0).any()] == []


def test_the_same_buffer_with_other_boundaries_gives_other_results() -> None:
    """Nothing is kept by the identity of a tensor."""
    streams, h0, *_ = packed_inputs("kda", torch.float32)
    cu = boundaries()
    ops.kda(*streams, initial_state=h0, cu_seqlens=cu)
    cu[2] = 20
    o, _ = ops.kda(*streams, initial_state=h0, cu_seqlens=cu)
    want, _ = ops.kda(*(x[:, :20] for x in streams), initial_state=h0[1:2])
    assert torch.equal(o[:, :20], want)


# (boundaries, what check says); the range that they come to without it
BAD = [
    ((3, 10, 20), "cu_seqlens must begin with 0, got 3", [(3, 10), (10, 20)]),
    ((0, 30, 10), "cu_seqlens must not decrease, got 30 and 10 at 1 and 2", [(0, 30), (30, 30)]),
    ((0, 30, 500), f"cu_seqlens must end within T = {T} tokens, got 500", [(0, 30), (30, T)]),
    ((-7, 30, 40), "cu_seqlens must begin with 0, got -7", [(0, 30), (30, 40)]),
    ((0, 2**31 - 1, 40), "cu_seqlens must not decrease, got 2147483647 and 40 at 1 and 2", [(0, T), (T, T)]),
]


@pytest.mark.parametrize(("bounds", "message", "ranges"), BAD, ids=lambda x: str(x)[:20])
def test_bad_boundaries_stay_within_the_tensors_and_are_named(bounds, message: str, ranges) -> None:
    streams, *_ = packed_inputs("gdn", torch.float32, state=False)
    cu = torch.tensor(bounds)
    with pytest.raises(ValueError, match="cu_seqlens") as caught:
        ops.gdn(*streams, cu_seqlens=cu, check=True)
    assert str(caught.value) == message
    o, ht = ops.gdn(*streams, cu_seqlens=cu, output_final_state=True)
    for n, (start, end) in enumerate(ranges):
        own, state = ops.gdn(*(x[:, start:end] for x in streams), output_final_state=True)
        assert torch.equal(o[:, start:end], own)
        assert torch.equal(ht[n : n + 1], state)


@pytest.mark.parametrize("name", ["kda", "gdn2_clipped"])
def test_packed_compiles_whole(name: str) -> None:
    op = getattr(ops, name)
    streams, h0, do, dht = packed_inputs(name, torch.float32)
    compiled = torch.compile(op, fullgraph=True, backend="aot_eager")
    options = {"output_final_state": True}
    for bounds in (BOUNDS, (0, 1, 2, 3, 50, 51, T)):
        options["cu_seqlens"] = torch.tensor(bounds)
        got = metrics.collect(compiled, name, streams, h0, do, dht, **options)
        want = metrics.collect(op, name, streams, h0, do, dht, **options)
        assert [key for key in want if not torch.equal(got[key], want[key])] == []


@pytest.mark.parametrize("save", [True, False])
def test_opcheck(save: bool) -> None:
    from dplrgen.generated import kda

    streams, h0, *_ = packed_inputs("kda", torch.bfloat16)
    given = [x.detach().requires_grad_(save) for x in (*streams, h0)]
    chunks, sequences = kda._packing(boundaries(), T, 32)
    torch.library.opcheck(kda._FORWARD_OP, (*given, chunks, sequences, 0.5, True, save))


@pytest.mark.parametrize("chunk", [16, 32, 64])
def test_the_table_of_chunks(chunk: int) -> None:
    """Every token of every sequence is in one chunk, in order, and chunks begin at fixed offsets of their sequence."""
    from dplrgen.generated import kda

    generator = torch.Generator().manual_seed(91)
    for length in (0, 1, 100, 1000):
        for count in (1, 2, 7, 50):
            cuts = torch.randint(0, length + 1, (count + 1,), generator=generator).sort().values
            chunks, sequences = kda._packing(cuts.int(), length, chunk)
            assert chunks.shape == (length // chunk + count, 2)
            want = []
            for n, (start, end) in enumerate(itertools.pairwise(cuts.tolist())):
                assert sequences[n].tolist() == [len(want), start]
                want += [[s, end - s] for s in range(start, end, chunk)]
            assert sequences[count].tolist() == [len(want), cuts[-1].item()]
            assert chunks[: len(want)].tolist() == want
            assert (chunks[len(want) :, 1] <= 0).all()
