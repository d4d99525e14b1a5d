"""torch.compile traces every op whole, forward and backward; torch.library.opcheck holds every registration."""

from __future__ import annotations

import importlib
from types import ModuleType

import metrics
import pytest
import torch
import torch._dynamo
from inputs import make
from oracles import ORACLES, names
from torch._dynamo.testing import CompileCounterWithBackend

from dplrgen import ops

torch.set_num_threads(1)

F32 = torch.float32
SIZES = (2, 70, 1, 2, 16, 24)

# The compiler's own warnings are not the op's.
pytestmark = pytest.mark.filterwarnings("default")


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def generated(name: str) -> ModuleType:
    return importlib.import_module(f"dplrgen.generated.{name}")


def layer(name: str):
    """The op with work before and after it, so that tracing crosses it rather than starting there."""
    op = getattr(ops, name)

    def call(*streams, scale=None, initial_state=None):
        streams = [x * 1.0 for x in streams]
        o, state = op(*streams, scale=scale, initial_state=initial_state, output_final_state=True)
        return o.tanh(), state + 1.0

    return call


def assert_same(got: metrics.Result, want: metrics.Result, limit: float = 1e-6) -> None:
    figures = metrics.worst(got, want)
    assert max(figures.values()) <= limit, figures
    assert {k: (x.dtype, x.shape) for k, x in got.items()} == {k: (x.dtype, x.shape) for k, x in want.items()}


@pytest.mark.parametrize("state", [True, False], ids=["state", "no-state"])
@pytest.mark.parametrize("name", ORACLES)
def test_fullgraph_equals_eager(name: str, state: bool) -> None:
    inputs = make(name, *SIZES, F32, state=state, seed=60)
    compiled = torch.compile(layer(name), fullgraph=True, backend="aot_eager", dynamic=False)
    want = metrics.collect(layer(name), name, *inputs)
    assert_same(metrics.collect(compiled, name, *inputs), want)


@pytest.mark.parametrize("name", ["kda", "gdn2_clipped", "rwkv7"])
def test_inductor_equals_eager(name: str) -> None:
    inputs = make(name, *SIZES, F32, seed=61)
    compiled = torch.compile(layer(name), fullgraph=True, backend="inductor", dynamic=False)
    assert_same(metrics.collect(compiled, name, *inputs), metrics.collect(layer(name), name, *inputs), 1e-5)


@pytest.mark.parametrize("name", ["kda", "gdn2_clipped", "gla"])
def test_bfloat16_with_float32_gates_traces(name: str) -> None:
    inputs = make(name, *SIZES, torch.bfloat16, gate_dtype=F32, seed=62)
    compiled = torch.compile(layer(name), fullgraph=True, backend="aot_eager", dynamic=False)
    want = metrics.collect(layer(name), name, *inputs)
    assert_same(metrics.collect(compiled, name, *inputs), want)


@pytest.mark.parametrize("name", ORACLES)
def test_dynamic_length_compiles_once(name: str) -> None:
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layer(name), fullgraph=True, backend=counter, dynamic=True)
    batch, _, *rest = SIZES
    for tokens in (70, 100, 133):
        inputs = make(name, batch, tokens, *rest, F32, seed=tokens)
        want = metrics.collect(layer(name), name, *inputs)
        assert_same(metrics.collect(compiled, name, *inputs), want)
    assert counter.frame_count == 1


@pytest.mark.parametrize("name", ORACLES)
def test_inference_traces_without_gradients(name: str) -> None:
    streams, h0, _, _ = make(name, *SIZES, F32, seed=63)
    op = getattr(ops, name)
    compiled = torch.compile(lambda *xs: op(*xs[:-1], initial_state=xs[-1]), fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        o, state = compiled(*streams, h0)
        want, _ = op(*streams, initial_state=h0)
    assert state is None
    assert torch.equal(o, want)


def forward_args(name: str, *, state: bool, grad: bool) -> tuple:
    streams, h0, _, _ = make(name, 1, 37, 1, 2, 16, 24, F32, state=state, seed=64)
    if not grad:
        streams, h0 = [x.detach() for x in streams], None if h0 is None else h0.detach()
    return (*streams, h0, None, None, 0.25, True, grad)


# With and without a state, saving for backward or not: every pair for two variants, the extremes for the others.
FORWARDS = [
    pytest.param(n, grad, state, id=f"{n}-{'grad' if grad else 'no-grad'}-{'state' if state else 'no-state'}")
    for n in ORACLES
    for grad in (True, False)
    for state in (True, False)
    if state == grad or n in ("kda", "gdn2_clipped")
]


@pytest.mark.parametrize(("name", "grad", "state"), FORWARDS)
def test_opcheck_forward(name: str, grad: bool, state: bool) -> None:
    torch.library.opcheck(generated(name)._FORWARD_OP, forward_args(name, state=state, grad=grad))


@pytest.mark.parametrize("name", ORACLES)
def test_opcheck_backward(name: str) -> None:
    module = generated(name)
    *inputs, scale, _, _ = forward_args(name, state=True, grad=False)
    with torch.no_grad():
        o, state, *saved = module._FORWARD_OP(*inputs, scale, True, True)
    every = (1 << (len(names(name)) + 1)) - 1
    args = (torch.randn_like(o), torch.randn_like(state), *inputs, *saved, scale)
    torch.library.opcheck(module._BACKWARD_OP, (*args, every))
    if name in ("kda", "dplr"):
        torch.library.opcheck(module._BACKWARD_OP, (None, *args[1:], every))
        torch.library.opcheck(module._BACKWARD_OP, (args[0], None, *args[2:], every))
        torch.library.opcheck(module._BACKWARD_OP, (*args, 0b101))


def test_the_checks_above_see_a_wrong_registration() -> None:
    """opcheck itself is run against an op whose fake implementation lies about a shape."""
    with torch.library._scoped_library("dplrgen_selftest", "FRAGMENT") as library:
        library.define("lies(Tensor x) -> Tensor")
        library.impl("lies", lambda x: x[:1].clone(), "CPU")
        torch.library.register_fake("dplrgen_selftest::lies", lambda x: x.new_empty(x.shape), lib=library)
        with pytest.raises(torch.testing._internal.optests.generate_tests.OpCheckError):
            torch.library.opcheck(torch.ops.dplrgen_selftest.lies.default, (torch.randn(3, 4),))


@pytest.mark.parametrize("fullgraph", [False, True])
def test_errors_are_the_same_text_when_traced(fullgraph: bool) -> None:
    streams, _, _, _ = make("kda", *SIZES, F32, seed=65)
    wrong = [x.detach() for x in streams]
    wrong[1] = wrong[1][..., :-1]
    with pytest.raises(ValueError, match="k must") as eager:
        ops.kda(*wrong)

    compiled = torch.compile(lambda *xs: ops.kda(*xs)[0] + 1, fullgraph=fullgraph, backend="aot_eager")
    with pytest.raises(Exception) as traced:  # noqa: PT011
        compiled(*wrong)
    assert str(eager.value) in str(traced.value)
    if not fullgraph:
        assert type(traced.value) is ValueError
        assert str(traced.value) == str(eager.value)


def test_errors_have_their_text_where_sizes_are_symbolic() -> None:
    def streams(T: int) -> list[torch.Tensor]:
        return [x.detach() for x in make("kda", 1, T, 1, 2, 16, 12, F32, seed=66)[0]]

    compiled = torch.compile(lambda *xs: ops.kda(*xs)[0], fullgraph=True, backend="eager")
    for T in (10, 20, 30):
        compiled(*streams(T))
    wrong = streams(40)
    wrong[1] = wrong[1][:, :-1]
    with pytest.raises(Exception, match=r"k must have shape \[B, T, H, K\] = \["):
        compiled(*wrong)
    with pytest.raises(Exception, match="scale must be finite, got 1000"):
        torch.compile(lambda *xs: ops.kda(*xs, scale=10**400)[0], fullgraph=True, backend="eager")(*streams(10))


def test_two_calls_in_one_graph_share_nothing() -> None:
    """Two layers in a row, the second with other sizes, traced as one graph."""
    first = make("kda", 1, 40, 1, 2, 16, 24, F32, seed=66)
    second = make("gdn", 1, 40, 2, 2, 20, 18, F32, seed=67)

    def both(*xs, scale=None, initial_state=None):
        o, state = ops.kda(*xs[:5], initial_state=initial_state, output_final_state=True)
        other, _ = ops.gdn(*xs[5:])
        return o + other.sum(-1, keepdim=True), state

    leaves, (do, dht) = [*first[0], *second[0], first[1]], first[2:]
    compiled = torch.compile(both, fullgraph=True, backend="aot_eager", dynamic=False)
    results = []
    for call in (both, compiled):
        o, state = call(*leaves[:-1], initial_state=leaves[-1])
        results.append([o, state, *metrics.backward_of(o, state, do, dht, leaves)])
    assert all(torch.allclose(x, y, rtol=1e-6, atol=1e-6) for x, y in zip(*results, strict=True))
