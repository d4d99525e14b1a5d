"""What the API refuses, with which exception and which words; and what it does not do when nobody asks."""

from __future__ import annotations

import importlib
import inspect
import re
import types
from pathlib import Path

import metrics
import pytest
import torch
from contract import aside
from inputs import has_gate, make
from oracles import GATES, ORACLES, SIGNATURES, names
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from dplrgen import ops

torch.set_num_threads(1)

F32, F64, BF16, F16 = torch.float32, torch.float64, torch.bfloat16, torch.float16
SIZE = {"B": 2, "T": 21, "H": 2, "HV": 4, "K": 16, "V": 24}
SIZES = tuple(SIZE.values())


def plain(name: str, dtype: torch.dtype = F32, **law) -> list[Tensor]:
    """Streams that require no grad."""
    return [x.detach() for x in make(name, *SIZES, dtype, seed=70, **law)[0]]


def state_for(name: str, dtype: torch.dtype = F32) -> Tensor:
    return make(name, *SIZES, dtype, seed=70)[1].detach()


def at(name: str, stream: str) -> int:
    return names(name).index(stream)


def with_stream(name: str, stream: str, change, dtype: torch.dtype = F32, **law) -> list[Tensor]:
    streams = plain(name, dtype, **law)
    streams[at(name, stream)] = change(streams[at(name, stream)])
    return streams


def symbols(shape: str) -> str:
    return "[" + ", ".join(shape.split()) + "]"


STREAMS = [pytest.param(v, s, shape, id=f"{v}-{s}") for v in SIGNATURES for s, shape in SIGNATURES[v]]


@pytest.mark.parametrize(("name", "stream", "shape"), STREAMS)
def test_wrong_rank_names_the_stream_the_shape_and_what_was_found(name: str, stream: str, shape: str) -> None:
    streams = with_stream(name, stream, lambda x: x[0])
    found = list(streams[at(name, stream)].shape)
    with pytest.raises(ValueError, match=rf"\b{stream}\b") as error:
        getattr(ops, name)(*streams)
    text = str(error.value)
    assert symbols(shape) in text
    assert str(found) in text


@pytest.mark.parametrize(("name", "stream", "shape"), [p for p in STREAMS if p.values[1] not in ("q", "v")])
def test_wrong_size_in_any_axis(name: str, stream: str, shape: str) -> None:
    for axis in range(len(shape.split())):
        streams = with_stream(name, stream, lambda x, axis=axis: torch.cat([x, x], dim=axis))
        found = list(streams[at(name, stream)].shape)
        with pytest.raises(ValueError, match=rf"\b{stream}\b") as error:
            getattr(ops, name)(*streams)
        assert symbols(shape) in str(error.value)
        assert str(found) in str(error.value)


@pytest.mark.parametrize(("stream", "axis"), [*(("q", i) for i in range(4)), *(("v", i) for i in range(3))])
@pytest.mark.parametrize("name", ORACLES)
def test_wrong_size_of_a_stream_that_defines_sizes(name: str, stream: str, axis: int) -> None:
    """q and v say what B, T, H, K, HV and V are, so the words may be about another stream; still a ValueError."""
    streams = with_stream(name, stream, lambda x: x.narrow(axis, 0, x.shape[axis] // 2))
    with pytest.raises(ValueError, match="must"):
        getattr(ops, name)(*streams)


@pytest.mark.parametrize("name", ORACLES)
def test_heads_must_divide_value_heads(name: str) -> None:
    streams = [
        x[:, :, :1].expand(-1, -1, 3 if "HV" not in shape.split() else 4, *[-1] * (x.ndim - 3)).contiguous()
        for x, (_, shape) in zip(plain(name), SIGNATURES[name], strict=True)
    ]
    with pytest.raises(ValueError, match="HV") as error:
        getattr(ops, name)(*streams)
    assert "3" in str(error.value)
    assert "4" in str(error.value)


@pytest.mark.parametrize(("name", "stream"), [(p.values[0], p.values[1]) for p in STREAMS])
def test_dtypes_do_not_mix(name: str, stream: str) -> None:
    """Neither float64 nor bfloat16 beside float32; float32 beside bfloat16 for a gate, and only there."""
    op = getattr(ops, name)
    for other in (F64, BF16, F16):
        with pytest.raises(TypeError, match=str(other).removeprefix("torch.")):
            op(*with_stream(name, stream, lambda x, other=other: x.to(other)))
    mixed = with_stream(name, stream, lambda x: x.float(), dtype=BF16)
    if stream in GATES:
        o, _ = op(*mixed)
        assert o.dtype == BF16
    else:
        with pytest.raises(TypeError, match="float32"):
            op(*mixed)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.bool, torch.complex64, torch.uint8])
@pytest.mark.parametrize("name", ORACLES)
def test_only_floats(name: str, dtype: torch.dtype) -> None:
    with pytest.raises(TypeError, match=str(dtype).removeprefix("torch.")):
        getattr(ops, name)(*(x.to(dtype) for x in plain(name)))
    last = names(name)[-1]
    with pytest.raises(TypeError, match=rf"\b{last}\b"):
        getattr(ops, name)(*with_stream(name, last, lambda x: x.to(dtype)))


@pytest.mark.parametrize("value", [None, 1.0, [[1.0]], "q"], ids=["None", "float", "list", "str"])
@pytest.mark.parametrize("name", ORACLES)
def test_only_tensors(name: str, value: object) -> None:
    for stream in names(name):
        with pytest.raises(TypeError, match=rf"\b{stream}\b"):
            getattr(ops, name)(*with_stream(name, stream, lambda x: value))


@pytest.mark.parametrize("name", ORACLES)
def test_float64_goes_through_state_and_all(name: str) -> None:
    streams, h0 = plain(name, F64), state_for(name, F64)
    o, state = getattr(ops, name)(*streams, initial_state=h0, output_final_state=True)
    assert (o.dtype, state.dtype) == (F64, F64)
    with pytest.raises(TypeError, match="initial_state"):
        getattr(ops, name)(*streams, initial_state=h0.float())


@pytest.mark.parametrize("dtype", [BF16, F16, F64, torch.int32])
@pytest.mark.parametrize("name", ORACLES)
def test_state_dtype(name: str, dtype: torch.dtype) -> None:
    state = state_for(name)
    with pytest.raises(TypeError, match="initial_state") as error:
        getattr(ops, name)(*plain(name), initial_state=state.to(dtype))
    assert "float32" in str(error.value)
    assert str(dtype).removeprefix("torch.") in str(error.value)
    o, last = getattr(ops, name)(*plain(name, BF16), initial_state=state, output_final_state=True)
    assert (o.dtype, last.dtype) == (BF16, F32)
    with pytest.raises(TypeError, match="initial_state"):
        getattr(ops, name)(*plain(name, BF16), initial_state=state.to(dtype))


@pytest.mark.parametrize("name", ORACLES)
def test_state_shape(name: str) -> None:
    state = state_for(name)
    for wrong in (state.mT, state[:1], state[:, :2], state[0], state[..., :-1], state.unsqueeze(0)):
        with pytest.raises(ValueError, match="initial_state") as error:
            getattr(ops, name)(*plain(name), initial_state=wrong.contiguous())
        assert "HV, K, V]" in str(error.value)
        assert str(list(wrong.shape)) in str(error.value)


@pytest.mark.parametrize("value", [0.5, [[0.0]], "zeros"], ids=["float", "list", "str"])
def test_state_kind(value: object) -> None:
    with pytest.raises(TypeError, match="initial_state"):
        ops.kda(*plain("kda"), initial_state=value)


@pytest.mark.parametrize("name", ORACLES)
def test_only_strided_tensors(name: str) -> None:
    op, streams, state = getattr(ops, name), plain(name), state_for(name)
    text = "must be a strided tensor, got layout torch.sparse_coo"
    for i, stream in enumerate(names(name)):
        with pytest.raises(TypeError, match=f"^{stream} {text}$"):
            op(*streams[:i], streams[i].to_sparse(), *streams[i + 1 :])
    with pytest.raises(TypeError, match=f"^initial_state {text}$"):
        op(*streams, initial_state=state.to_sparse())
    with pytest.raises(TypeError, match=f"^cu_seqlens {text}$"):
        op(*(x[:1] for x in streams), cu_seqlens=torch.tensor([0, 1]).to_sparse())
    with pytest.raises(TypeError, match=f"^state {text}$"):
        getattr(ops, f"{name}_step")(*(x[:, 0] for x in streams), state.to_sparse())


@pytest.mark.parametrize(
    "value", [torch.tensor(0.5), torch.tensor([1.0]), "1", [1.0], 1j], ids=lambda x: type(x).__name__
)
@pytest.mark.parametrize("name", ORACLES)
def test_scale_is_a_number(name: str, value: object) -> None:
    with pytest.raises(TypeError, match="scale"):
        getattr(ops, name)(*plain(name), scale=value)


@pytest.mark.parametrize(
    "value", ["yes", [], 1, None, torch.tensor(True)], ids=["str", "list", "int", "None", "tensor"]
)
@pytest.mark.parametrize("name", ORACLES)
def test_flags_are_true_or_false(name: str, value: object) -> None:
    kind = type(value).__name__
    for flag in ("output_final_state", "check"):
        with pytest.raises(TypeError, match=f"^{flag} must be True or False, got {kind}$"):
            getattr(ops, name)(*plain(name), **{flag: value})
    for flag in ("inplace", "check"):
        with pytest.raises(TypeError, match=f"^{flag} must be True or False, got {kind}$"):
            getattr(ops, f"{name}_step")(*(x[:, 0] for x in plain(name)), state_for(name), **{flag: value})


@pytest.mark.parametrize("name", ORACLES)
def test_what_a_gpu_does_not_run_is_refused_by_name(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module(f"dplrgen.generated.{name}")
    for dtype in (F32, BF16, F16):
        with pytest.raises(NotImplementedError, match=f"^{name}: K must be at most 256 on a GPU, got 257$"):
            module._config(257, dtype)
        module._config(256, dtype)
    with pytest.raises(NotImplementedError, match=rf"^{name}: T must be below 2\^31 on a GPU, got 2147483648$"):
        module._check_limits(B=1, T=2**31, HV=1, K=16, V=16, N=1)
    with pytest.raises(NotImplementedError, match=rf"^{name}: N \* HV \* \(V / 16 \+ 1\) must be below 2\^31"):
        module._check_limits(B=1, T=16, HV=2, K=16, V=16, N=2**29)
    module._check_limits(B=1, T=2**29, HV=2, K=16, V=16, N=2**28)
    there = types.SimpleNamespace(device=torch.device("cuda", 1))
    for capability, memory, text in (
        ((7, 5), 64, "needs compute capability 8.0 or later, cuda:1 has 7.5"),
        ((8, 6), 99, "needs 160 KiB of shared memory a program, cuda:1 has 99"),
    ):
        monkeypatch.setattr(module, "_capability", lambda device, x=capability: x)
        monkeypatch.setattr(module, "_shared_memory", lambda device, x=memory: x * 1024)
        with pytest.raises(NotImplementedError, match=f"^{name} {text}$"):
            module._check_products(there)
    monkeypatch.setattr(module, "_capability", lambda device: (8, 0))
    monkeypatch.setattr(module, "_shared_memory", lambda device: 163 * 1024)
    module._check_products(there)


@pytest.mark.parametrize("name", ORACLES)
def test_an_integer_scale_is_that_float(name: str) -> None:
    op, streams = getattr(ops, name), plain(name)
    assert torch.equal(op(*streams, scale=2)[0], op(*streams, scale=2.0)[0])
    assert torch.equal(op(*streams, scale=None)[0], op(*streams, scale=0.25)[0])  # K = 16
    assert not torch.equal(op(*streams, scale=2)[0], op(*streams)[0])
    assert not op(*streams, scale=0)[0].any()


@pytest.mark.parametrize("name", ORACLES)
def test_signature(name: str) -> None:
    parameters = inspect.signature(getattr(ops, name)).parameters
    assert tuple(parameters)[: len(names(name))] == names(name)
    options = {n: p for n, p in parameters.items() if n not in names(name)}
    assert {"scale": None, "initial_state": None, "output_final_state": False, "cu_seqlens": None}.items() <= {
        n: p.default for n, p in options.items()
    }.items()
    assert all(p.kind is inspect.Parameter.KEYWORD_ONLY for p in options.values())


@pytest.mark.parametrize("misspelt", ["initial_states", "output_final_states", "cu_seqlen", "head_first"])
@pytest.mark.parametrize("name", ORACLES)
def test_misspelt_keyword(name: str, misspelt: str) -> None:
    with pytest.raises(TypeError, match=misspelt):
        getattr(ops, name)(*plain(name), **{misspelt: None})


@pytest.mark.parametrize("name", ORACLES)
def test_streams_by_name_and_options_by_name_only(name: str) -> None:
    op, streams = getattr(ops, name), plain(name)
    assert torch.equal(op(**dict(zip(names(name), streams, strict=True)))[0], op(*streams)[0])
    with pytest.raises(TypeError, match="positional"):
        op(*streams, 0.5)
    with pytest.raises(TypeError, match=names(name)[-1]):
        op(*streams[:-1])


@pytest.mark.parametrize("name", ORACLES)
def test_packing_is_validated(name: str) -> None:
    op, two = getattr(ops, name), plain(name)
    one = [x[:1] for x in two]
    bounds = torch.tensor([0, 9, 21])
    state = torch.zeros(3, SIZES[3], *SIZES[4:])
    for streams, options, kind, text in (
        (one, {"cu_seqlens": [0, 9]}, TypeError, "cu_seqlens must be a tensor or None, got list"),
        (one, {"cu_seqlens": bounds.float()}, TypeError, "dtype torch.int32 or torch.int64, got torch.float32"),
        (one, {"cu_seqlens": bounds[None]}, ValueError, r"shape \[N \+ 1\] with N at least 1, got \[1, 3\]"),
        (one, {"cu_seqlens": bounds[:1]}, ValueError, r"shape \[N \+ 1\] with N at least 1, got \[1\]"),
        (
            two,
            {"cu_seqlens": bounds},
            ValueError,
            "B must be 1 with cu_seqlens: sequences are packed along T, got B = 2",
        ),
        (one, {"cu_seqlens": bounds, "initial_state": state}, ValueError, r"\[N, HV, K, V\] = \[2, .*\], got \[3, "),
    ):
        with pytest.raises(kind, match=text):
            op(*streams, **options)


@pytest.mark.parametrize("name", ORACLES)
def test_other_devices(name: str) -> None:
    op, streams = getattr(ops, name), plain(name)
    with pytest.raises(NotImplementedError, match="meta"):
        op(*(x.to("meta") for x in streams))
    for stream in names(name):
        mixed = with_stream(name, stream, lambda x: x.to("meta"))
        with pytest.raises((ValueError, NotImplementedError), match="meta"):
            op(*mixed)
    with pytest.raises((ValueError, NotImplementedError), match="initial_state"):
        op(*streams, initial_state=state_for(name).to("meta"))


def test_mixed_devices_are_a_value_error() -> None:
    for stream in names("kda")[1:]:
        with pytest.raises(ValueError, match=rf"\b{stream}\b"):
            ops.kda(*with_stream("kda", stream, lambda x: x.to("meta")))


def test_unknown_variant() -> None:
    with pytest.raises(AttributeError, match="kdaa"):
        ops.kdaa  # noqa: B018


def test_refusals_are_made_in_python_before_any_op_runs() -> None:
    """A few lines at most, in an exception of exactly a built-in type."""
    for call in (
        lambda: ops.kda(*with_stream("kda", "k", lambda x: x[..., :-1])),
        lambda: ops.kda(*with_stream("kda", "k", lambda x: x.double())),
        lambda: ops.kda(*plain("kda"), cu_seqlens=torch.tensor([0, 21])),
    ):
        with Calls() as calls, pytest.raises((TypeError, ValueError, NotImplementedError)) as error:
            call()
        assert type(error.value) in (TypeError, ValueError, NotImplementedError)
        assert len(str(error.value).splitlines()) <= 3
        assert not calls.of("kda")


# What runs, seen by a dispatch mode below autograd.


class Calls(TorchDispatchMode):
    """Records every op of the generated modules that runs: (op, arguments, results)."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[object, tuple, object]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.seen.append((func, args, result))
        return result

    def of(self, name: str, which: str = "_FORWARD_OP") -> list[tuple[tuple, object]]:
        op = getattr(importlib.import_module(f"dplrgen.generated.{name}"), which)
        return [(args, result) for func, args, result in self.seen if func.name() == op.name()]


def saved_elements(result: object) -> int:
    return sum(x.numel() for x in list(result)[2:] if x is not None)


def table_of_saved() -> dict[str, tuple[int, int, int]]:
    """What docs/design.md says: matrices, bytes saved and bytes of the inputs a token and head, by variant."""
    page = (Path(__file__).parents[1] / "docs" / "design.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (`\w+`(?:, `\w+`)*) \| (\d+) \| (\d+) \| (\d+) \|$", page, re.MULTILINE)
    return {name: tuple(map(int, rest)) for cell, *rest in rows for name in re.findall(r"\w+", cell)}  # type: ignore[misc]


def test_what_is_saved_is_what_the_page_says() -> None:
    page = table_of_saved()
    assert set(page) == set(ORACLES)
    sizes = {"B": 2, "T": 192, "H": 3, "HV": 3, "K": 128, "V": 128}
    for name, said in page.items():
        with FakeTensorMode():  # a GPU's tensors without a GPU: shapes and dtypes are all that is asked
            streams = [
                torch.empty([sizes[axis] for axis in shape.split()], dtype=torch.bfloat16, device="cuda")
                for _, shape in SIGNATURES[name]
            ]
            _, _, *saved = importlib.import_module(f"dplrgen.generated.{name}")._FORWARD_OP(
                *streams, None, None, None, 1.0, False, True
            )
        tokens = sizes["B"] * sizes["T"] * sizes["H"]
        found = [sum(x.numel() * x.element_size() for x in tensors) / tokens for tensors in (saved, streams)]
        assert (len(saved), *found) == said, name


@pytest.mark.parametrize("name", ORACLES)
def test_nothing_is_saved_without_gradients(name: str) -> None:
    op = getattr(ops, name)
    streams, h0, _, _ = make(name, *SIZES, F32, seed=71)
    with Calls() as calls, torch.no_grad():
        o, state = op(*streams, initial_state=h0, output_final_state=True)
    ((args, result),) = calls.of(name)
    assert args[-1] is False
    assert saved_elements(result) == 0
    assert not o.requires_grad
    assert not state.requires_grad

    with Calls() as calls:
        o, _ = op(*(x.detach() for x in streams), initial_state=h0.detach())
    ((args, result),) = calls.of(name)
    assert args[-1] is False
    assert saved_elements(result) == 0
    assert not o.requires_grad

    with Calls() as calls:
        o, state = op(*streams, initial_state=h0, output_final_state=True)
    ((args, result),) = calls.of(name)
    assert args[-1] is True
    assert o.requires_grad
    assert state.requires_grad


@pytest.mark.parametrize("name", ORACLES)
def test_an_unasked_final_state_is_not_made(name: str) -> None:
    with Calls() as calls:
        _, state = getattr(ops, name)(*plain(name))
    ((_, result),) = calls.of(name)
    assert state is None
    assert result[1] is None or result[1].numel() == 0


@pytest.mark.parametrize("name", ORACLES)
def test_gradients_reach_exactly_the_inputs_that_want_them(name: str) -> None:
    streams, h0, do, dht = make(name, *SIZES, F64, seed=72)
    op = getattr(ops, name)
    want = metrics.run(op, name, streams, h0, do, dht)
    for i, stream in enumerate((*names(name), "h0")):
        leaves = [x.detach().requires_grad_(n == i) for n, x in enumerate((*streams, h0))]
        with Calls() as calls:
            o, state = op(*leaves[:-1], initial_state=leaves[-1], output_final_state=True)
            torch.autograd.backward([o, state], [do, dht])
        ((args, _),) = calls.of(name, "_BACKWARD_OP")
        assert args[-1] == 1 << i, f"needs for {stream} alone"
        assert [x.grad is not None for x in leaves] == [n == i for n in range(len(leaves))]
        assert metrics.rr(leaves[i].grad, want[f"d{stream}"]) < 1e-11, stream


def test_no_backward_runs_when_nothing_wants_it() -> None:
    streams, h0, _, _ = make("kda", *SIZES, F32, seed=73)
    other = torch.ones(3, requires_grad=True)
    with Calls() as calls:
        o, _ = ops.kda(*(x.detach() for x in streams), initial_state=h0.detach())
        (o.sum() * other).sum().backward()
    assert calls.of("kda")
    assert not calls.of("kda", "_BACKWARD_OP")


# Layouts.


def strided(x: Tensor, how: str) -> Tensor:
    """The same numbers in another layout."""
    if how == "heads first":
        y = x.transpose(1, 2).contiguous().transpose(1, 2)
    elif how == "last axis strided":
        y = torch.stack([x, torch.full_like(x, 7.0)], dim=-1)[..., 0]
    elif how == "slice of a wider tensor":
        wide = torch.full((*x.shape[:-1], x.shape[-1] + 5), 7.0, dtype=x.dtype)
        wide[..., 2:-3] = x
        y = wide[..., 2:-3]
    elif how == "tokens reversed":
        y = x.flip(1).contiguous()[:, torch.arange(x.shape[1] - 1, -1, -1)].transpose(0, 1).contiguous().transpose(0, 1)
    else:
        raise ValueError(how)
    assert torch.equal(x, y)
    return y


@pytest.mark.parametrize("how", ["heads first", "last axis strided", "slice of a wider tensor", "tokens reversed"])
@pytest.mark.parametrize("name", ORACLES)
def test_layout_changes_nothing(name: str, how: str) -> None:
    streams, h0, do, dht = make(name, *SIZES, F32, seed=74)
    op = getattr(ops, name)
    want = metrics.run(op, name, streams, h0, do, dht)
    others = [strided(x.detach(), how).requires_grad_() for x in streams]
    state = strided(h0.detach(), how).requires_grad_()
    assert not others[0].is_contiguous()
    got = metrics.run(op, name, others, state, strided(do, how), strided(dht, how))
    assert all(torch.equal(got[key], want[key]) for key in want)


@pytest.mark.parametrize("name", ORACLES)
def test_broadcast_inputs_and_cotangents(name: str) -> None:
    """expand() makes strides of 0, and the sum of an output sends such a cotangent."""
    streams, h0, _, _ = make(name, *SIZES, F64, seed=75)
    op = getattr(ops, name)
    small = [x.detach()[:, :1].clone().requires_grad_() for x in streams]

    def total(make_streams):
        o, state = op(*make_streams, initial_state=h0, output_final_state=True)
        return torch.autograd.grad(o.sum() + state.sum(), [*small, h0])

    tokens = SIZE["T"]
    got = total([x.expand(-1, tokens, *[-1] * (x.ndim - 2)) for x in small])
    want = total([x.repeat(1, tokens, *[1] * (x.ndim - 2)) for x in small])
    assert all(metrics.rr(x, y) < 1e-12 for x, y in zip(got, want, strict=True))


@pytest.mark.parametrize("name", [n for n in ORACLES if has_gate(n)])
def test_messages_hold_no_addresses(name: str) -> None:
    with pytest.raises(ValueError, match="must") as error:
        getattr(ops, name)(*with_stream(name, "g", lambda x: x[..., :1, :0]))
    assert not re.search(r"0x[0-9a-f]{6,}|object at", str(error.value))


@pytest.mark.parametrize("dtype", [F32, BF16], ids=["float32", "bfloat16"])
def test_kernels_read_what_is_aligned_where_it_is(dtype: torch.dtype) -> None:
    """A tensor that kernels cannot read by its strides is copied, a contiguous one that begins elsewhere too."""
    module = importlib.import_module("dplrgen.generated.kda")
    for shape in ((2, 70, 3, 60), (2, 70, 3)):
        x = torch.randn(shape).to(dtype)
        assert module._readable(x, 64) is x
        view = aside(x)
        assert view.is_contiguous()
        assert view.data_ptr() % 16 != 0
        copy = module._readable(view, 64)
        assert copy.data_ptr() % 16 == 0
        assert torch.equal(copy, x)
        assert copy.stride() == x.stride()


def test_an_export_for_a_gpu_is_not_tied_to_a_range_of_lengths() -> None:
    """Sizes past what kernels can count are refused by the launch, not by a guard of the graph."""

    class Layer(torch.nn.Module):
        def forward(self, *x: torch.Tensor) -> torch.Tensor:
            return ops.kda(*x)[0]

    length = torch.export.Dim("T")
    with FakeTensorMode(), torch.no_grad():
        given = tuple(torch.empty(x.shape, device="cuda") for x in plain("kda"))
        program = torch.export.export(Layer(), given, dynamic_shapes=(tuple({1: length} for _ in given),))
    assert all(bounds.upper > 2**31 for bounds in program.range_constraints.values())
    assert program.range_constraints
