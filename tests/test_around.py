"""What is around a call: autograd's other modes, autocast, transforms, defaults, what torch.compile makes of scales."""

from __future__ import annotations

import importlib
import warnings

import pytest
import torch
import torch._dynamo.testing
import torch.autograd.forward_ad as forward_ad
import torch.utils.checkpoint
from inputs import make
from oracles import ORACLES
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import dplrgen
from dplrgen import Variant, ops
from dplrgen.ir import exp, gate, key, value

torch.set_num_threads(1)

F32, BF16 = torch.float32, torch.bfloat16
SIZES = (2, 70, 1, 2, 16, 12)  # B, T, H, HV, K, V


def drawn(name: str, dtype: torch.dtype = F32, seed: int = 90) -> tuple[list[Tensor], Tensor]:
    streams, h0, _, _ = make(name, *SIZES, dtype, seed=seed)
    return streams, h0


def results(name: str, streams: list[Tensor], h0: Tensor) -> list[Tensor]:
    o, ht = getattr(ops, name)(*streams, initial_state=h0, output_final_state=True)
    return [o, ht, *torch.autograd.grad(o.float().square().sum() + ht.sum(), [*streams, h0])]


def same(found: list[Tensor], wanted: list[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(found, wanted, strict=True))


@pytest.fixture(autouse=True)
def fresh_compiler() -> None:
    torch._dynamo.reset()


# Autograd


@pytest.mark.parametrize("name", ORACLES)
def test_second_derivatives_are_refused(name: str) -> None:
    streams, _ = drawn(name)
    o, _ = getattr(ops, name)(*streams)
    grads = torch.autograd.grad(o.square().sum(), streams, create_graph=True)
    assert all(torch.isfinite(x).all() for x in grads)  # asked for, and not used
    with pytest.raises(NotImplementedError, match=f"{name} has no second derivatives"):
        torch.autograd.grad(sum(x.square().sum() for x in grads), streams)


@pytest.mark.parametrize("name", ["kda", "simple_gla"])
def test_forward_mode_is_refused(name: str) -> None:
    streams, h0 = drawn(name)
    plain, state = [x.detach() for x in streams], h0.detach()
    op = getattr(ops, name)

    def of_v(v: Tensor) -> Tensor:
        return op(*plain[:2], v, *plain[3:])[0]

    def step_of(h: Tensor) -> Tensor:
        return op.step(*(x[:, 0] for x in plain), h)[0]

    for f, x in ((of_v, plain[2]), (step_of, state)):
        with pytest.raises(NotImplementedError, match="has no forward-mode derivatives"):
            torch.func.jvp(f, (x,), (torch.ones_like(x),))
        with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="has no forward-mode derivatives"):
            f(forward_ad.make_dual(x, torch.ones_like(x)))


def test_gradients_of_inputs_used_alike_are_two_memories() -> None:
    """One head and a batch of one, where the CPU's results need no copy to be laid out."""
    q, k, v, u, g, beta = key("q"), key("k"), value("v"), value("u"), gate("g", "K"), gate("beta")
    alike = Variant(name="alike", inputs=(q, k, v, u, g, beta), decay=exp(g), a=k, b=beta * k, k=k, v=v + u)
    op = dplrgen.build(alike)
    generator = torch.Generator().manual_seed(91)
    given = [torch.rand(1, 32, 1, 8, generator=generator) for _ in range(4)]
    given += [-torch.rand(1, 32, 1, 8, generator=generator), torch.rand(1, 32, 1, generator=generator)]
    leaves = [x.requires_grad_() for x in given]
    op(*leaves)[0].sum().backward()
    once = [x.grad.clone() for x in leaves]
    op(*leaves)[0].sum().backward()
    assert same([x.grad for x in leaves], [2 * x for x in once])
    assert len({x.grad.untyped_storage().data_ptr() for x in leaves}) == len(leaves)


@pytest.mark.parametrize("name", ["kda", "gdn2_clipped"])
def test_one_graph_gives_its_gradients_twice(name: str) -> None:
    streams, h0 = drawn(name)
    o, ht = getattr(ops, name)(*streams, initial_state=h0, output_final_state=True)
    loss = o.square().sum() + ht.sum()
    first, again = (torch.autograd.grad(loss, [*streams, h0], retain_graph=True) for _ in range(2))
    assert same(list(first), list(again))


def test_a_kept_state_that_is_overwritten_is_noticed() -> None:
    streams, h0 = drawn("kda")
    state = h0.detach().clone()
    o, _ = ops.kda(*streams, initial_state=state)
    with torch.no_grad():
        ops.kda_step(*(x[:, 0].detach() for x in streams), state, inplace=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        o.sum().backward()


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpoints(reentrant: bool) -> None:
    streams, h0 = drawn("kda")

    def block(*given: Tensor) -> Tensor:
        return ops.kda(*given[:-1], initial_state=given[-1])[0].tanh()

    want = torch.autograd.grad(block(*streams, h0).sum(), [*streams, h0])
    out = torch.utils.checkpoint.checkpoint(block, *streams, h0, use_reentrant=reentrant)
    if reentrant:
        out.sum().backward()
        assert same([x.grad for x in (*streams, h0)], list(want))
    else:
        assert same(list(torch.autograd.grad(out.sum(), [*streams, h0])), list(want))


# Modes


@pytest.mark.parametrize("name", ORACLES)
@pytest.mark.parametrize("dtype", [F32, BF16], ids=["float32", "bfloat16"])
def test_autocast_does_not_reach_into_an_op(name: str, dtype: torch.dtype) -> None:
    streams, h0 = drawn(name, dtype)
    want = results(name, streams, h0)
    with torch.autocast("cpu", BF16):
        assert same(results(name, streams, h0), want)


def test_default_dtype_and_device_do_not_matter() -> None:
    streams, h0 = drawn("kda")
    cu = torch.tensor([0, 30, 70])
    one = [x.detach()[:1] for x in streams]

    def every() -> list[Tensor]:
        with torch.no_grad():
            packed = ops.kda(*one, cu_seqlens=cu)[0]
            o, state = ops.kda_step(*(x[:, 0] for x in streams), h0)
        return [*results("kda", streams, h0), packed, o, state]

    want = every()
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):
            found = every()
    finally:
        torch.set_default_dtype(torch.float32)
    assert same(found, want)


def test_vmap_is_a_loop_over_calls() -> None:
    streams, _ = drawn("kda")
    plain = [x.detach() for x in streams]
    many = torch.stack([plain[2], 2 * plain[2], -plain[2]])
    found = torch.func.vmap(lambda v: ops.kda(*plain[:2], v, *plain[3:])[0])(many)
    assert same(list(found), [ops.kda(*plain[:2], v, *plain[3:])[0] for v in many])


# torch.compile and torch.export


@pytest.mark.parametrize("step", [False, True], ids=["op", "step"])
def test_a_scale_that_changes_is_never_an_earlier_one(step: bool) -> None:
    """Dynamo makes a number that changes symbolic, and its caches have given an earlier one's graph."""
    streams, h0 = drawn("kda")
    plain, state = [x.detach() for x in streams], h0.detach()

    def of_sequence(s: float, *x: Tensor) -> Tensor:
        return ops.kda(x[0] * s, *x[1:], scale=s + 0.1)[0]

    def of_token(s: float, *x: Tensor) -> Tensor:
        return ops.kda_step(x[0][:, 0] * s, *(y[:, 0] for y in x[1:]), state, scale=s + 0.1)[0]

    call = of_token if step else of_sequence
    compiled = torch.compile(call, fullgraph=True)
    for s in (0.15, 0.25, 0.35, 0.45, 0.55):
        torch.testing.assert_close(compiled(s, *plain), call(s, *plain), rtol=1e-5, atol=1e-6)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(SIZES[4], SIZES[4])

    def forward(self, q: Tensor, *rest: Tensor) -> Tensor:
        return ops.kda(self.into(q), *rest)[0]


def test_a_layer_is_exported_for_any_length() -> None:
    streams, _ = drawn("kda")
    plain, layer = tuple(x.detach() for x in streams), Layer()
    length = torch.export.Dim("T")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.export.export(layer, plain, dynamic_shapes=({1: length}, tuple({1: length} for _ in plain[1:])))
    for T in (1, 5, 33, 70):
        given = [x[:, :T] for x in plain]
        torch.testing.assert_close(program.module()(*given), layer(*given), rtol=1e-5, atol=1e-6)


def test_lengths_batches_and_sequences_compile_a_few_times() -> None:
    streams, _ = drawn("kda")
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")

    def train(cu: Tensor | None, *given: Tensor) -> Tensor:
        return ops.kda(*given, cu_seqlens=cu)[0].sum()

    compiled = torch.compile(train, backend=counter, fullgraph=True)
    for B, T in ((2, 70), (2, 33), (2, 20), (2, 65), (1, 40)):
        compiled(None, *(x[:B, :T].detach().requires_grad_() for x in streams)).backward()
    assert counter.frame_count <= 3
    before = counter.frame_count
    for bounds in ([0, 70], [0, 5, 70], [0, 5, 9, 70], [0, 1, 2, 3, 70], [0, 7, 11, 23, 40, 70]):
        compiled(torch.tensor(bounds), *(x[:1].detach().requires_grad_() for x in streams)).backward()
    assert counter.frame_count <= before + 3


def test_a_step_is_compiled_for_any_batch_and_pool() -> None:
    streams, _ = drawn("kda")
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")

    def step(state: Tensor, slots: Tensor | None, *token: Tensor) -> Tensor:
        return ops.kda_step(*token, state, inplace=True, state_indices=slots)[0]

    compiled = torch.compile(step, backend=counter, fullgraph=True)
    token = [x.detach()[0] for x in streams]
    with torch.no_grad():
        for pool in (None, 8, 16, 11):
            for B in (4, 3, 5, 7, 6):
                given = [x[:B] for x in token]
                slots = None if pool is None else torch.arange(B).flip(0)
                states = [torch.ones(pool or B, 2, *SIZES[4:]) for _ in range(2)]
                assert same([compiled(states[0], slots, *given)], [step(states[1], slots, *given)])
                assert same(states[:1], states[1:])
    assert counter.frame_count <= 6


@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.jacrev], ids=lambda f: f.__name__)
def test_gradients_by_transforms_are_refused(transform) -> None:
    """A step has no gradients, in a graph neither, where they were 0; the op's are those of torch.autograd."""
    streams, h0 = drawn("kda")
    plain, state = [x.detach() for x in streams], h0.detach()
    token = [x[:, 0] for x in plain]
    calls = {
        "no gradients: call it under": (lambda s: ops.kda_step(*token, s)[0].sum(), (False, True)),
        "kda has no gradients by torch.func": (lambda s: ops.kda(*plain, initial_state=s)[0].sum(), (False,)),
    }
    for text, (call, traced) in calls.items():
        for compiled in traced:
            taken = transform(call)
            taken = torch.compile(taken, backend="aot_eager", fullgraph=True) if compiled else taken
            with pytest.raises(Exception, match=text):
                taken(state)


def test_packed_boundaries_may_be_made_in_a_graph() -> None:
    streams, _ = drawn("kda")
    plain = [x.detach()[:1] for x in streams]
    position = torch.cat([torch.arange(n) for n in (9, 30, 31)])

    def call(position: Tensor, *x: Tensor) -> Tensor:
        starts = (position == 0).nonzero().squeeze(-1)
        return ops.kda(*x, cu_seqlens=torch.nn.functional.pad(starts, (0, 1), value=position.shape[0]))[0]

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
        found = compiled(position, *plain)
        with pytest.raises(RuntimeError, match="Runtime assertion failed"):
            compiled(position + 1, *plain)  # no start: one boundary is left, of no sequence
    assert same([found], [call(position, *plain)])


@pytest.mark.parametrize("name", ORACLES)
def test_fakes_have_the_strides_of_results(name: str) -> None:
    """Those of axes of one element too, and every result is memory of its own size."""
    module = importlib.import_module(f"dplrgen.generated.{name}")
    for sizes in ((1, 40, 1, 1, 16, 12), (2, 33, 1, 2, 1, 12), (1, 64, 2, 2, 16, 1)):
        streams, h0, do, dht = make(name, *sizes, F32, seed=91)
        given = [x.detach() for x in (*streams, h0)]
        call = (*given, None, None, 0.25, True, True)
        real = module._FORWARD_OP(*call)
        back = module._BACKWARD_OP(do, dht, *call[:-3], *real[2:], 0.25, 2 ** len(given) - 1)
        with FakeTensorMode() as mode:
            fake = [mode.from_tensor(x) for x in given]
            told = module._FORWARD_OP(*fake, *call[len(given) :])
            cotangents = [mode.from_tensor(x) for x in (do, dht)]
            told_back = module._BACKWARD_OP(*cotangents, *fake, None, None, *told[2:], 0.25, 2 ** len(given) - 1)
        for x, y in zip((*real, *back), (*told, *told_back), strict=True):
            assert (x.shape, x.stride(), x.dtype) == (y.shape, y.stride(), y.dtype)
        for x in (real[0], *back):
            assert x.untyped_storage().nbytes() == x.nbytes
