"""The contract of every op on a GPU: the checks of tests/contract.py, random calls, and what only a GPU can show.

    python benchmarks/check_contract.py --out $OUT --budget-seconds 500
    python benchmarks/check_contract.py --out $OUT --parts large --only pool

Parts: `huge` (sizes that need most of the memory: give --workers 1), `large` (memory, CUDA graphs, many sequences),
`devices` (needs two GPUs), `sizes` (head sizes), `checks` (every check, the variants that it asks something of),
`draws` (random calls until the time is up). Items run in worker processes, as in check_gpu.py. Writes OUT/NAME.jsonl
and OUT/NAME.txt; exit code 1 if anything fails, 2 if something was not run.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import gc
import json
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import bench
from bench import Json

bench.use_checkout()

import contract  # noqa: E402
import torch  # noqa: E402
from inputs import has_gate, make  # noqa: E402
from oracles import names  # noqa: E402

GPU = "cuda"
VARIANTS = tuple(contract.SIGNATURES)


# ---------------------------------------------------------------------------------------------------------------------
# What only a GPU can show. Each takes a variant and gives what it found wrong.


def random_call(
    name: str, B: int, T: int, H: int, HV: int, K: int, V: int, states: int | None = None, dtype: Any = None
):
    """Inputs drawn on the device, for sizes that are too large to draw elsewhere; no cotangents kept."""
    dtype = dtype or torch.bfloat16
    size = {"B": B, "T": T, "H": H, "HV": HV, "K": K, "V": V}
    streams = []
    for stream, shape in contract.SIGNATURES[name]:
        x = torch.empty([size[s] for s in shape.split()], dtype=dtype, device=GPU)
        if stream == "v":
            x.normal_()
        elif stream == "g":
            x.uniform_(-1.0, 0.0)
        elif stream in ("beta", "eta", "e", "w"):
            x.uniform_(0.0, 1.0)
        else:
            x.normal_().mul_(K**-0.5 / (2 if stream in ("a", "b", "d") else 1))
        streams.append(x)
    h0 = torch.randn(B if states is None else states, HV, K, V, device=GPU)
    return streams, h0


def run(name: str, streams, h0, do=None, dht=None, **options):
    """Outputs and gradients, as metrics.collect gives them."""
    streams = [x.detach().requires_grad_() for x in streams]
    h0 = h0.detach().requires_grad_()
    v = streams[names(name).index("v")]
    do = torch.ones_like(v) if do is None else do
    dht = torch.ones_like(h0) if dht is None else dht
    return contract.run(name, streams, h0, do, dht, **options)


def grid_limits(name: str) -> list[str]:
    """More batch rows, heads and sequences than a grid axis has places: the same as in two halves, to the bit."""
    streams, h0 = random_call(name, 10923, 32, 6, 6, 16, 16)
    whole, failures = run(name, streams, h0), []
    for rows in (slice(0, 5000), slice(5000, None)):
        part = run(name, [x[rows] for x in streams], h0[rows])
        failures += contract.differing(f"rows from {rows.start}", {k: x[rows] for k, x in whole.items()}, part)
    N, length = 2050, 9
    streams, h0 = random_call(name, 1, N * length, 32, 32, 16, 16, states=N)
    cu = torch.arange(N + 1, device=GPU) * length
    whole = run(name, streams, h0, cu_seqlens=cu)
    half = N // 2
    for part, tokens in ((slice(0, half), slice(0, half * length)), (slice(half, N), slice(half * length, N * length))):
        own = cu[: part.stop - part.start + 1]
        got = run(name, [x[:, tokens] for x in streams], h0[part], cu_seqlens=own)
        want = {k: x[part] if k in ("ht", "dh0") else x[:, tokens] for k, x in whole.items()}
        failures += contract.differing(f"sequences from {part.start}", want, got)
    return failures


def batch_past_2_31(name: str) -> list[str]:
    """2.4e9 elements a tensor: the last rows are what they are alone, to the bit, gradients too."""
    streams, h0 = random_call(name, 4096, 576, 8, 8, 128, 16)
    rows = slice(4093, 4096)
    do = torch.zeros_like(streams[names(name).index("v")])
    do[rows] = 1.0
    whole = {k: x[rows].clone() for k, x in run(name, streams, h0, do).items()}
    return contract.differing("last rows", whole, run(name, [x[rows] for x in streams], h0[rows], do[rows]))


def sequence_past_2_31(name: str) -> list[str]:
    """2.2e9 elements along one sequence: what follows a hand-off at a chunk's edge is the same bits."""
    T, cut = 2_200_000, 2_199_936
    streams, h0 = random_call(name, 1, T, 8, 8, 128, 16)
    with torch.no_grad():
        o, ht = contract.of(name)(*streams, initial_state=h0, output_final_state=True)
        _, state = contract.of(name)(*(x[:, :cut] for x in streams), initial_state=h0, output_final_state=True)
        tail, end = contract.of(name)(*(x[:, cut:] for x in streams), initial_state=state, output_final_state=True)
    same = {
        "o": torch.equal(o[:, cut:], tail),
        "ht": torch.equal(ht, end),
        "finite": bool(torch.isfinite(o[:, -999:]).all()),
    }
    return [f"long sequence: {k}" for k, x in same.items() if not x]


def gradients_past_2_31(name: str) -> list[str]:
    """Gradients past 2.2e9 elements of one sequence: those of its last tokens alone, from their state, to the bit."""
    T, cut = 2_200_000, 2_199_936
    streams, h0 = random_call(name, 1, T, 8, 8, 128, 16)
    do = torch.randn_like(streams[names(name).index("v")])
    with torch.no_grad():
        _, state = contract.of(name)(*(x[:, :cut] for x in streams), initial_state=h0, output_final_state=True)
    tail = run(name, [x[:, cut:] for x in streams], state, do[:, cut:])
    got = run(name, streams, h0, do)
    failures = [] if torch.isfinite(got["dh0"]).all() else ["long sequence: dh0 is not finite"]
    ends = {k: x if k == "ht" else x[:, cut:] for k, x in got.items() if k != "dh0"}
    del tail["dh0"]
    return failures + contract.differing("long sequence", ends, tail)


def many_states(name: str) -> list[str]:
    """4000 sequences with states, some empty: equal to a batch of their own where that is the same call."""
    N, HV, K, V = 4000, 8, 64, 64
    lengths = torch.randint(0, 12, (N,), generator=torch.Generator().manual_seed(1))
    bounds = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    streams, h0 = random_call(name, 1, int(bounds[-1]), HV, HV, K, V, states=N)
    got = run(name, streams, h0, cu_seqlens=bounds.to(GPU))
    failures = []
    for n in (0, 1, 777, 1999, 3998, 3999, *torch.nonzero(lengths == 0)[:2, 0].tolist()):
        tokens = slice(int(bounds[n]), int(bounds[n + 1]))
        alone = run(name, [x[:, tokens] for x in streams], h0[n : n + 1])
        part = {k: x[n : n + 1] if k in ("ht", "dh0") else x[:, tokens] for k, x in got.items()}
        failures += contract.differing(f"sequence {n} of {tokens.stop - tokens.start}", part, alone)
    return failures


def long_pack(name: str) -> list[str]:
    """50 documents of 340 tokens or so in one row: finite gradients, and each document that of a call of its own."""
    generator = torch.Generator().manual_seed(3)
    cuts = torch.randint(0, 17001, (49,), generator=generator).tolist()
    bounds = sorted([0, *cuts, 17000])
    streams, h0 = random_call(name, 1, 17000, 16, 16, 128, 128, states=50)
    do = torch.randn_like(streams[names(name).index("v")])
    got = run(name, streams, h0, do, cu_seqlens=torch.tensor(bounds, device=GPU))
    failures = [f"{k} is not finite" for k, x in got.items() if not torch.isfinite(x).all()]
    for n in (0, 17, 49):
        tokens = slice(bounds[n], bounds[n + 1])
        alone = run(name, [x[:, tokens] for x in streams], h0[n : n + 1], do[:, tokens])
        part = {k: x[n : n + 1] if k in ("ht", "dh0") else x[:, tokens] for k, x in got.items()}
        failures += contract.differing(f"document {n}", part, alone)
    return failures


def packed_sizes(name: str, K: int = 33, V: int = 100) -> list[str]:
    """Packed at head sizes whose kernels are others than those of `contract.packed`: a call a sequence, to the bit."""
    failures, bounds = [], [0, 70, 70, 100, 130]
    streams, h0 = random_call(name, 1, 130, 2, 4, K, V, states=4)
    do = torch.randn_like(streams[names(name).index("v")])
    got = run(name, streams, h0, do, cu_seqlens=torch.tensor(bounds, device=GPU))
    for n in (0, 2, 3):
        tokens = slice(bounds[n], bounds[n + 1])
        alone = run(name, [x[:, tokens] for x in streams], h0[n : n + 1], do[:, tokens])
        part = {k: x[n : n + 1] if k in ("ht", "dh0") else x[:, tokens] for k, x in got.items()}
        failures += contract.differing(f"K = {K}, V = {V}, sequence {n}", part, alone)
    return failures


def nearly_full(name: str) -> list[str]:
    """With just enough memory the same bits; with too little the call says so, writes nothing; the next is right."""
    streams, h0 = random_call(name, 2, 4096, 4, 8, 64, 64)
    want, failures, kept = run(name, streams, h0), [], [x.clone() for x in (*streams, h0)]
    torch.cuda.synchronize()
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    held, total = torch.cuda.memory_reserved(), torch.cuda.get_device_properties(0).total_memory
    run(name, streams, h0)
    need = torch.cuda.max_memory_reserved() - held
    gc.collect()
    torch.cuda.empty_cache()
    try:
        torch.cuda.set_per_process_memory_fraction((held + 0.5 * need) / total)
        try:
            run(name, streams, h0)
            failures.append("half of the memory that a call takes was enough")
        except torch.cuda.OutOfMemoryError:
            pass
        gc.collect()
        torch.cuda.empty_cache()
        failures += [
            f"input {i} was written"
            for i, (x, y) in enumerate(zip((*streams, h0), kept, strict=True))
            if (x != y).any()
        ]
        torch.cuda.set_per_process_memory_fraction((held + 1.1 * need) / total)
        failures += contract.differing("nearly full", run(name, streams, h0), want)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    return failures


def head_sizes(name: str, K: int = 1, V: int = 1) -> list[str]:
    """Head sizes that no other check has, judged against the loop."""
    return contract.every_size(name, dataclasses.replace(PLACE, K=K, V=V))


#: The smallest and largest, odd ones, and what falls between the blocks of the kernels.
HEAD_SIZES = ((1, 1), (3, 5), (8, 12), (15, 17), (96, 96), (160, 32), (129, 257), (64, 512), (255, 511))


# ---------------------------------------------------------------------------------------------------------------------
# More than one GPU


def other_gpu(name: str) -> list[str]:
    """Tensors on a GPU that is not the current one: the same bits, results beside them, and nothing switched."""
    streams, h0 = random_call(name, 1, 130, 2, 4, 64, 60, states=3)
    cu = torch.tensor([0, 37, 100, 130], device=GPU)
    failures: list[str] = []
    for options in ({}, {"cu_seqlens": cu}):
        first = h0[:1] if not options else h0
        here = run(name, streams, first, **options)
        there = run(
            name,
            [x.to("cuda:1") for x in streams],
            first.to("cuda:1"),
            **{k: x.to("cuda:1") for k, x in options.items()},
        )
        failures += [f"{k} is on {x.device}" for k, x in there.items() if x.device != torch.device("cuda:1")]
        failures += contract.differing(
            f"on the other GPU, {list(options)}", {k: x.to(GPU) for k, x in there.items()}, here
        )
    step = getattr(contract.ops, f"{name}_step")
    token = [x[:, 0] for x in streams]
    here_o, here_state = step(*token, h0[:1].clone())
    there_o, there_state = step(*(x.to("cuda:1") for x in token), h0[:1].to("cuda:1"))
    if not (torch.equal(there_o.to(GPU), here_o) and torch.equal(there_state.to(GPU), here_state)):
        failures.append("a step on the other GPU differs")
    if torch.cuda.current_device() != 0:
        failures.append("the current GPU was switched")
    try:
        contract.of(name)(*streams[:-1], streams[-1].to("cuda:1"))
        failures.append("tensors on two GPUs were taken")
    except ValueError as error:
        failures += [] if "cuda:1" in str(error) else [f"mixed devices: {error}"]
    return failures


def compiled_on_other_gpu(name: str) -> list[str]:
    """The same through torch.compile, whole."""
    streams, _ = random_call(name, 1, 130, 2, 4, 64, 60)
    there = [x.to("cuda:1").requires_grad_() for x in streams]
    op = torch.compile(contract.of(name), fullgraph=True)
    o, _ = op(*there)
    want, _ = contract.of(name)(*there)
    grads = (torch.autograd.grad(x.sum(), there) for x in (o, want))
    same = [torch.equal(o, want), *(torch.equal(x, y) for x, y in zip(*grads, strict=True))]
    return [f"compiled on the other GPU: result {i} differs" for i, x in enumerate(same) if not x]


def pool(name: str) -> list[str]:
    """A slot beyond 2^31 elements into a pool of states: that slot is updated and no other."""
    P, HV, K, V = 4200, 32, 128, 128
    streams, _ = random_call(name, 3, 1, HV, HV, K, V)
    token = [x[:, 0] for x in streams]
    states = torch.randn(P, HV, K, V, device=GPU)
    slots = torch.tensor([4100, -1, 0], device=GPU, dtype=torch.int32)
    used, before = slots[[0, 2]].long(), states.clone()
    step = getattr(contract.ops, f"{name}_step")
    want, after = step(*(x[[0, 2]] for x in token), states[used])
    o, _ = step(*token, states, inplace=True, state_indices=slots)
    same = {"o": torch.equal(o[[0, 2]], want), "padding": not o[1].any(), "slots": torch.equal(states[used], after)}
    states[used] = before[used]
    same["others"] = torch.equal(states, before)
    return [f"pool: {k}" for k, x in same.items() if not x]


def thousand_batches(name: str) -> list[str]:
    """1000 packed batches, each with boundaries in a new tensor, the old one freed: each equals its own sequences."""
    generator = torch.Generator().manual_seed(2)
    T, N = 192, 5
    streams, h0 = random_call(name, 1, T, 2, 4, 64, 64, states=N)
    failures: list[str] = []
    with torch.no_grad():
        for number in range(1000):
            cuts = torch.randint(0, T + 1, (N + 1,), generator=generator).sort().values
            o, ht = contract.of(name)(*streams, initial_state=h0, output_final_state=True, cu_seqlens=cuts.to(GPU))
            n = number % N
            tokens = slice(int(cuts[n]), int(cuts[n + 1]))
            own = [x[:, tokens] for x in streams]
            alone, end = contract.of(name)(*own, initial_state=h0[n : n + 1], output_final_state=True)
            outside = torch.ones(T, dtype=torch.bool)
            outside[int(cuts[0]) : int(cuts[-1])] = False
            if (
                not (torch.equal(o[:, tokens], alone) and torch.equal(ht[n : n + 1], end))
                or o[:, outside.to(GPU)].any()
            ):
                failures.append(f"batch {number}: {cuts.tolist()}")
    return failures[:3]


def graph(name: str) -> list[str]:
    """Forward and backward of a packed call in a CUDA graph, replayed with other boundaries in the same buffer."""
    T, N = 256, 4
    streams, h0 = random_call(name, 1, T, 2, 4, 64, 64, states=N)
    streams, h0 = [x.requires_grad_() for x in streams], h0.requires_grad_()
    do, dht = torch.randn(1, T, 4, 64, device=GPU, dtype=torch.bfloat16), torch.randn_like(h0)
    cu = torch.tensor([0, 30, 100, 100, 250], device=GPU, dtype=torch.int32)

    def both() -> dict[str, torch.Tensor]:
        return contract.run(name, streams, h0, do, dht, cu_seqlens=cu)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        both()
    torch.cuda.current_stream().wait_stream(side)
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        results = both()
    failures = []
    for bounds in ([0, 256, 256, 256, 256], [0, 1, 2, 3, 4], [0, 64, 128, 192, 256], [0, 0, 77, 201, 255]):
        cu.copy_(torch.tensor(bounds))
        captured.replay()
        got = {k: x.clone() for k, x in results.items()}
        failures += contract.differing(f"replay with {bounds}", got, both())
    return failures


def no_host_reads(name: str) -> list[str]:
    """A packed training call and a step make the host wait for nothing."""
    streams, h0 = random_call(name, 1, 200, 2, 4, 64, 64, states=3)
    cu = torch.tensor([0, 30, 100, 190], device=GPU, dtype=torch.int32)
    run(name, streams, h0, cu_seqlens=cu)
    token, states = [x[:, 0] for x in streams], h0[:1].clone()
    getattr(contract.ops, f"{name}_step")(*token, states, inplace=True)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        run(name, streams, h0, cu_seqlens=cu)
        getattr(contract.ops, f"{name}_step")(*token, states, inplace=True)
    except RuntimeError as error:
        return [f"host reads: {error}"]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return []


def poisoned(name: str) -> list[str]:
    """Memory that holds NaN before a call changes no bit of it, packed or not."""
    failures = []
    for bounds in (None, [0, 37, 100, 100]):
        streams, h0 = random_call(name, 1, 110, 2, 4, 64, 64, states=None if bounds is None else 3)
        options = {} if bounds is None else {"cu_seqlens": torch.tensor(bounds, device=GPU)}
        plain = run(name, streams, h0, **options)
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = True
        got = run(name, streams, h0, **options)
        torch.use_deterministic_algorithms(False)
        failures += contract.differing(f"poisoned, {bounds}", got, plain)
    return failures


def guarded(name: str) -> list[str]:
    """Inputs that end right before 1e30 and NaN give the bits of inputs alone: nothing past a tensor matters."""
    failures = []
    for K, V in ((60, 100), (3, 5), (100, 33)):
        for T in (1, 29):
            streams, h0 = random_call(name, 2, T, 2, 4, K, V)
            plain = run(name, streams, h0)
            views = []
            for x in (*streams, h0):
                room = torch.full(
                    (x.numel() + 8192,), float("nan") if x.dtype == torch.float32 else 1e30, device=GPU, dtype=x.dtype
                )
                views.append(room[4096 : 4096 + x.numel()].view(x.shape).copy_(x))
            failures += contract.differing(
                f"guarded, K = {K}, V = {V}, T = {T}", run(name, views[:-1], views[-1]), plain
            )
    return failures


def flat_error(name: str) -> list[str]:
    """The error does not grow with the length: 16384 tokens are as right as 512."""
    import fastref
    import metrics

    worst: dict[int, dict[str, float]] = {}
    for T in (512, 16384):
        given = make(
            name, 1, T, 2, 2, 64, 64, torch.bfloat16, regime="mild" if has_gate(name) else "zero", seed=5, device=GPU
        )
        got, ref = contract.run(name, *given), fastref.reference(name, *given)
        worst[T] = metrics.worst(got, ref)
    grown = {k: (x, worst[16384][k]) for k, x in worst[512].items() if worst[16384][k] > 1.5 * x + 1e-4}
    return [f"error grows: {k} from {x:.1e} to {y:.1e}" for k, (x, y) in grown.items()]


def every_length(name: str) -> list[str]:
    """Every length from 1 to 130: finite, and the outputs of the longest."""
    import metrics

    given = make(name, 2, 130, 2, 4, 64, 60, torch.bfloat16, regime="mild" if has_gate(name) else "zero", device=GPU)
    streams, h0, *_ = given
    ref, failures = _reference(name, *given)["o"], []
    with torch.no_grad():
        for T in range(1, 131):
            o, _ = contract.of(name)(*(x[:, :T] for x in streams), initial_state=h0, output_final_state=True)
            if not (x := metrics.rr(o, ref[:, :T])) < 5e-3:
                failures.append(f"T = {T}: o rr {x:.1e}")
    return failures


def leaves_nothing(name: str) -> list[str]:
    """Calls whose results are gone leave no memory behind: what is allocated does not grow with their number."""
    sizes = []
    for _ in range(6):
        streams, h0 = random_call(name, 1, 256, 2, 4, 64, 64)
        run(name, streams, h0)
        del streams, h0
        gc.collect()
        torch.cuda.synchronize()
        time.sleep(0.05)  # the thread of the backward lets go of its last call a little later
        sizes.append(torch.cuda.memory_allocated())
    return [f"allocated after each call: {sizes}"] if min(sizes[3:]) > min(sizes[:3]) else []


def two_gate_dtypes(name: str) -> list[str]:
    """float32 gates, then bfloat16 ones, then float32 again, at the same shapes: each its own kernel."""
    failures = []
    for dtype in (torch.float32, torch.bfloat16, torch.float32):
        place = dataclasses.replace(PLACE, dtype=torch.bfloat16)
        given = make(
            name,
            1,
            100,
            2,
            4,
            64,
            64,
            torch.bfloat16,
            gate_dtype=dtype,
            regime="mild" if has_gate(name) else "zero",
            device=GPU,
        )
        failures += contract.judged(name, place, f"gates in {dtype}", given)
    return failures


HUGE: dict[str, tuple[Callable[[str], list[str]], Sequence[str]]] = {
    "batch_past_2_31": (batch_past_2_31, ("kda",)),
    "sequence_past_2_31": (sequence_past_2_31, ("kda",)),
    "gradients_past_2_31": (gradients_past_2_31, ("gdn",)),
    "grid_limits": (grid_limits, ("kda", "gdn", "dplr")),
    "pool": (pool, ("kda", "gdn2_clipped")),
}
DEVICES: dict[str, tuple[Callable[[str], list[str]], Sequence[str]]] = {
    "other_gpu": (other_gpu, VARIANTS),
    "compiled_on_other_gpu": (compiled_on_other_gpu, ("kda", "gdn2_clipped")),
}
LARGE: dict[str, tuple[Callable[[str], list[str]], Sequence[str]]] = {
    **{
        f.__name__: (f, VARIANTS)
        for f in (
            graph,
            poisoned,
            guarded,
            no_host_reads,
            many_states,
            nearly_full,
            flat_error,
            every_length,
            leaves_nothing,
            two_gate_dtypes,
        )
    },
    **{
        f"packed_sizes_{K}x{V}": (functools.partial(packed_sizes, K=K, V=V), VARIANTS)
        for K, V in ((33, 100), (64, 128), (100, 33), (128, 128))
    },
    "long_pack": (long_pack, ("kda", "gdn", "dplr")),
    "thousand_batches": (thousand_batches, ("kda", "gdn", "dplr", "gdn2_clipped")),
}


#: A few variants a size, each variant at two: compiling is what takes the time.
SIZES: dict[str, tuple[Callable[[str], list[str]], Sequence[str]]] = {
    f"head_sizes_{K}x{V}": (functools.partial(head_sizes, K=K, V=V), VARIANTS[i % 5 :: 5])
    for i, (K, V) in enumerate(HEAD_SIZES)
}
TABLES = {"huge": HUGE, "large": LARGE, "devices": DEVICES, "sizes": SIZES}


# ---------------------------------------------------------------------------------------------------------------------
# Items


def _reference(*args: Any) -> Any:
    import fastref

    return fastref.reference(*args)


PLACE = contract.Place(GPU, torch.bfloat16, 64, 60, _reference)

#: K and the V that goes with it: a draw of kernels to compile is what takes the time.
PAIRS = {64: 60, 33: 100}


def items(parts: Sequence[str], count: int, seed: int, fixed: Json | None = None) -> list[Json]:
    """What the parts ask for, in one order; `fixed` holds choices of the draws, by field."""
    out: list[Json] = []
    for part, table in TABLES.items():
        if part in parts:
            out += [{"part": part, "check": k, "variant": v} for k, (_, vs) in table.items() for v in vs]
    if "checks" in parts:
        asked = [(f.__name__, v) for f in contract.CHECKS for v in VARIANTS if contract.asks(f, v)]
        found = [{"part": "checks", "check": f, "variant": v} for f, v in asked]
        out += [{**x, "dtype": "bfloat16"} for x in found]
        out += [{**x, "dtype": "bfloat16", "K": 128, "V": 100} for x in found if x["check"] == "hard_keys"]
        out += [
            {**x, "dtype": d}
            for d in ("float16", "float32")
            for x in found
            if x["variant"] in ("kda", "dplr", "gdn2_clipped")
        ]
    if "draws" in parts:
        drawn = contract.draws(count, seed, **{"K": tuple(PAIRS), "H": (2, 3), **(fixed or {})})
        out += [{"part": "draws", "draw": dataclasses.asdict(dataclasses.replace(d, V=PAIRS[d.K]))} for d in drawn]
    return out


def label(item: Json) -> str:
    if item["part"] == "draws":
        return "draw " + " ".join(f"{k}={v}" for k, v in item["draw"].items())
    size = f" K={item['K']}" if "K" in item else ""
    return f"{item['check']} {item['variant']} {item.get('dtype', '')}{size}".strip()


def choice(text: str) -> tuple[str, tuple[object, ...]]:
    """A field of the draws and what it may be, of NAME=VALUE,VALUE. V follows from K."""
    name, _, values = text.partition("=")
    known = {str(x): x for x in {**contract.CHOICES, "K": PAIRS, "V": ()}.get(name, ())}
    found = tuple(known[x] for x in values.split(",") if x in known)
    if len(found) != len(values.split(",")):
        raise argparse.ArgumentTypeError(f"expected NAME=VALUE,VALUE of {', '.join(contract.CHOICES)}, got {text!r}")
    return name, found


def judge(item: Json) -> Json:
    start = time.monotonic()
    if item["part"] == "draws":
        failures = contract.check_draw(contract.Draw(**item["draw"]), PLACE)
    elif item["part"] in TABLES:
        failures = TABLES[item["part"]][item["check"]][0](item["variant"])
    else:
        check = next(f for f in contract.CHECKS if f.__name__ == item["check"])
        sizes = {"dtype": getattr(torch, item["dtype"]), "K": item.get("K", PLACE.K), "V": item.get("V", PLACE.V)}
        failures = check(item["variant"], dataclasses.replace(PLACE, **sizes))
    torch.cuda.synchronize()
    if torch.cuda.memory_reserved() > 2 << 30:
        torch.cuda.empty_cache()
    return {"failures": failures, "seconds": round(time.monotonic() - start, 2)}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--name", default="contract")
    parser.add_argument("--parts", default="large,checks,draws", type=lambda x: x.split(","))
    parser.add_argument("--only", metavar="REGEX")
    parser.add_argument("--draws", type=int, default=4000)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--fix", type=choice, nargs="*", default=[], help="choices of the draws: NAME=VALUE,VALUE ...")
    parser.add_argument("--workers", type=int, default=min(14, os.cpu_count() or 1))
    parser.add_argument("--budget-seconds", type=float, default=float("inf"))
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.worker:
        torch.set_num_threads(1)
        bench.serve(judge)
        return 0
    if args.out is None:
        parser.error("--out is needed")
    if "devices" in args.parts and torch.cuda.device_count() < 2:
        parser.error(f"the part devices needs two GPUs, found {torch.cuda.device_count()}")
    start = time.monotonic()
    args.out.mkdir(parents=True, exist_ok=True)
    chosen = [
        x for x in items(args.parts, args.draws, args.seed, dict(args.fix)) if re.search(args.only or "", label(x))
    ]
    rows: list[Json] = []
    with (args.out / f"{args.name}.jsonl").open("w") as file:

        def note(item: Json, answer: Json) -> None:
            row = answer.get("row") or {"failures": [answer["error"]], "seconds": None}
            rows.append({**item, **row})
            print(json.dumps(rows[-1]), file=file, flush=True)

        command = [sys.executable, __file__, "--worker"]
        left = bench.run_pool(
            command,
            chosen,
            args.workers,
            note,
            until=start + args.budget_seconds,
            item_seconds=240.0,
            grace=30.0,
            environment={"OMP_NUM_THREADS": "1"},
        )
    counts = Counter((row["part"], bool(row["failures"])) for row in rows)
    lines = [", ".join(f"{k} {v}" for k, v in bench.versions(GPU).items())]
    lines.append("programs " + " ".join(bench.generated(v)._NAME for v in VARIANTS))
    for part in args.parts:
        lines.append(f"{part}: {counts[part, False]} passed, {counts[part, True]} failed")
    lines.append(f"{len(left)} not run, {time.monotonic() - start:.0f} s")
    failed = [row for row in rows if row["failures"]]
    lines += [f"  {label(row)}: {'; '.join(str(x) for x in row['failures'][:2])[:300]}" for row in failed[:40]]
    text = "\n".join(lines)
    (args.out / f"{args.name}.txt").write_text(text + "\n")
    print(text)
    return 1 if failed else 2 if left else 0


if __name__ == "__main__":
    sys.exit(main())
