"""Numerics of a variant's operator on this machine, against its own recurrence a token at a time in float64.

The loop knows no variant: it evaluates the streams' expressions and applies the master recurrence,

    h_t = Diag(alpha_t) h_(t-1) - a_t (alpha_t b_t)^T h_(t-1) + k_t v_t^T        o_t = scale * h_t^T q_t

with the state ``h [K, V]`` as the operators store it. ``alpha b`` is simplified first, so that a binding with
``b = d / alpha`` is never divided. Inputs are drawn by their role, rounded to the dtype under test, and the loop runs
on the rounded values: what is measured is the operator's error alone.

An error is ``rr(x) = rms(x - ref) / rms(ref)``. Since one wrong row hides in such a figure, every (batch, head) must be
within twice the bound too, and every block of 16 rows within ten times the bound of its head.
"""

from __future__ import annotations

import importlib
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dplrgen import compile_hook, ops
from dplrgen.interpret import evaluate
from dplrgen.ir import Node, Program, topological
from dplrgen.passes import IDENTITIES, Rule, factors, lift, product, rewrite
from dplrgen.variants import VARIANTS, Variant

__all__ = ["Case", "Measured", "cases", "draw", "kernels", "measure", "operator", "report", "token_loop"]

Operator = Callable[..., tuple[Tensor, Tensor | None]]
Tensors = dict[str, Tensor]

#: By dtype: outputs and final state, gradients of keys, values and states, gradients of gates.
_BOUNDS: Mapping[torch.dtype, tuple[float, float, float]] = {
    torch.float64: (1e-10, 1e-10, 1e-9),
    torch.float32: (1e-4, 1e-4, 1e-3),
    torch.bfloat16: (5e-3, 8e-3, 2e-2),
    torch.float16: (5e-3, 8e-3, 2e-2),
}
_HEAD, _BLOCK, _ROWS = 2.0, 10.0, 16
#: At strong decay a decay's gradient is what is left where larger terms cancel: so much of rms(q dq) is allowed beside.
_ALLOWANCE = 1e-5


# ---------------------------------------------------------------------------------------------------------------------
# The reference


def _cancelled(n: Node) -> Node | None:
    """``y (x / y) = x``"""
    if n.op != "mul":
        return None
    sign, parts = factors(n)
    for i, quotient in enumerate(parts):
        for m, other in enumerate(parts):
            if i != m and quotient.op == "div" and quotient.args[1] is other:
                rest = [quotient.args[0] if s == i else p for s, p in enumerate(parts) if s != m]
                return product(sign, rest, n.axes)
    return None


_CANCEL = Rule("cancel", "y (x / y) = x: the decay times an erase vector that was divided by it", _cancelled)


def _streams(variant: Variant) -> dict[str, Node]:
    """The streams over one token, simplified, with ``erase = alpha b`` in place of b."""
    named = variant.streams()
    named["erase"] = named["decay"] * named.pop("b")
    program, _ = rewrite(Program(variant.name, tuple(named.items())), (*IDENTITIES, _CANCEL))
    return dict(program.outputs)


def token_loop(variant: Variant, inputs: Mapping[str, Tensor], state: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """o and the final state; differentiable, in the dtype of the inputs, which come as the operator takes them."""
    B, T, HV, V = inputs[_first(variant, "value")].shape
    K = inputs[_first(variant, "key")].shape[3]
    leaves: dict[str, Tensor | float] = {name: _per_head(x, HV) for name, x in inputs.items()}
    lifted = _over_tokens(_streams(variant))
    values = evaluate(list(lifted.values()), leaves)
    q, decay, a, k, v, erase = (
        values[lifted[name]].expand(B, HV, T, V if name == "v" else K)
        for name in ("q", "decay", "a", "k", "v", "erase")
    )
    h, rows = state, []
    for t in range(T):
        lost = (erase[:, :, t, :, None] * h).sum(-2, keepdim=True)
        h = decay[:, :, t, :, None] * h - a[:, :, t, :, None] * lost + k[:, :, t, :, None] * v[:, :, t, None, :]
        rows.append(scale * (q[:, :, t, :, None] * h).sum(-2))
    return torch.stack(rows, 1), h


def _over_tokens(streams: Mapping[str, Node]) -> dict[str, Node]:
    """The streams over all tokens of a sequence at once: none reads another token."""
    lifted = tuple((name, lift(n, ("C", "V" if name == "v" else "K"))) for name, n in streams.items())
    program, _ = rewrite(Program("tokens", lifted), IDENTITIES)
    return dict(program.outputs)


def _per_head(x: Tensor, HV: int) -> Tensor:
    """[B, T, heads, ...] as [B, HV, T, ...]: a key head serves its group of value heads."""
    return x.repeat_interleave(HV // x.shape[2], 2).transpose(1, 2)


# ---------------------------------------------------------------------------------------------------------------------
# Inputs

_REGIMES = ("mild", "strong", "spikes", "weak")


@dataclass(frozen=True)
class Case:
    """What is run: the law of the decay's gates, sizes, the seed, and whether gates stay float32 beside bfloat16."""

    regime: str
    B: int
    T: int
    H: int
    HV: int
    K: int
    V: int
    seed: int = 0
    wide_gates: bool = False


def cases(variant: Variant) -> list[Case]:
    """Two shapes a regime, one with whole blocks and one without; tails in both.

    ``weak`` is left out where the erase vectors are free of what they erase: such a recurrence expands.
    """
    free = _keys(variant.b) - _keys(variant.a)
    regimes = [r for r in _REGIMES if r != "weak" or not free] if _decay_gates(variant) else ["no decay"]
    shapes = [(2, 200, 2, 2, 64, 64), (1, 131, 2, 4, 36, 20)]
    return [Case(r, *shape, seed=i, wide_gates=i > 0) for r in regimes for i, shape in enumerate(shapes)]


def _first(variant: Variant, role: str) -> str:
    """The input that sizes are read from."""
    return next(str(n.attr("name")) for n in variant.inputs if n.attr("role") == role)


def _names(n: Node) -> set[str]:
    return {str(m.attr("name")) for m in topological([n]) if m.op == "input"}


def _keys(n: Node) -> set[str]:
    return {str(m.attr("name")) for m in topological([n]) if m.op == "input" and m.attr("role") == "key"}


def _decay_gates(variant: Variant) -> set[str]:
    """Gates that set the decay and nothing else, or else all that it reads."""
    streams = _streams(variant)
    gates = {str(n.attr("name")) for n in variant.inputs if n.attr("role") == "gate"} & _names(streams["decay"])
    # A binding with b = d / alpha reads the decay's gate in b, but not in alpha b.
    erase = _names(variant.b) & _names(streams["erase"])
    elsewhere = erase.union(*(_names(streams[s]) for s in ("q", "a", "k", "v")))
    return gates - elsewhere or gates


def _logarithmic(n: Node, gate: str, inside: bool = False) -> bool:
    """Whether a decay reads the gate as a logarithm: within an exponential or a sigmoid, and not a logarithm of it."""
    if n.op == "input":
        return inside and n.attr("name") == gate
    inside = n.op in ("exp", "sigmoid") or (inside and n.op != "log")
    return any(_logarithmic(a, gate, inside) for a in n.args if gate in _names(a))


def draw(variant: Variant, case: Case, dtype: torch.dtype, device: str) -> tuple[Tensors, Tensors]:
    """The inputs with the initial state, and the cotangents of o and of the final state.

    Keys have unit length, erase vectors that are inputs of their own a random length below 1; values are normal, gates
    uniform in (0, 1), and those of the decay a regime's. Drawn on the CPU in float64: a seed means the same anywhere.
    """
    generator = torch.Generator().manual_seed(case.seed)
    sizes = {"H": case.H, "HV": case.HV, "K": case.K, "V": case.V}

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(shape, generator=generator, dtype=torch.float64)

    kept = _keys(variant.k) | _keys(variant.a) | _keys(variant.streams()["q"])
    decays = {gate for gate in _decay_gates(variant) if _logarithmic(variant.decay, gate)}
    drawn: Tensors = {}
    for n, (name, heads, axes) in zip(variant.inputs, variant.signature(), strict=True):
        shape = (case.B, case.T, sizes[heads], *(sizes[x] for x in axes))
        role = n.attr("role")
        if role == "key":
            unit = F.normalize(normal(*shape), dim=-1)
            drawn[name] = unit if name in kept else unit * uniform(*shape[:3], 1)
        elif role == "gate":
            drawn[name] = (
                _decay(case.regime, normal(*shape), uniform(*shape[:3])) if name in decays else uniform(*shape)
            )
        else:
            drawn[name] = normal(*shape)
    drawn = _shrinking(variant, drawn, sorted(decays), case.HV)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    state = (case.B, case.HV, case.K, case.V)
    gates = {str(n.attr("name")) for n in variant.inputs if n.attr("role") == "gate"}
    gate_dtype = wide if case.wide_gates else dtype
    inputs = {n: x.to(device, gate_dtype if n in gates else dtype).requires_grad_() for n, x in drawn.items()}
    inputs["initial_state"] = normal(*state).to(device, wide).requires_grad_()
    upstream = {"o": normal(case.B, case.T, case.HV, case.V).to(device, dtype), "ht": normal(*state).to(device, wide)}
    return inputs, upstream


def _shrinking(variant: Variant, drawn: Tensors, gates: Sequence[str], HV: int) -> Tensors:
    """The draw, its decay's gates with the first signs by which no decay is above 1: exp(-x) and exp(x y) decay too."""
    lifted = _over_tokens(_streams(variant))
    for signs in itertools.product((1.0, -1.0), repeat=len(gates)):
        turned = drawn | {name: sign * drawn[name] for name, sign in zip(gates, signs, strict=True)}
        leaves: dict[str, Tensor | float] = {name: _per_head(x, HV) for name, x in turned.items()}
        if bool((evaluate(list(lifted.values()), leaves)[lifted["decay"]] <= 1.0).all()):
            return turned
    return drawn


def _decay(regime: str, noise: Tensor, lot: Tensor) -> Tensor:
    """A log-decay: small, ordinary, -20 a token, or -1e4 at a tenth of the tokens."""
    if regime == "strong":
        return torch.full_like(noise, -20.0)
    g = F.logsigmoid(noise) * (0.01 if regime == "weak" else 1.0)
    if regime != "spikes":
        return g
    return torch.where(lot.view(*lot.shape, *[1] * (noise.dim() - lot.dim())) < 0.1, torch.full_like(g, -1e4), g)


# ---------------------------------------------------------------------------------------------------------------------
# The judgement


@dataclass(frozen=True)
class Measured:
    """One tensor: its error, the bound on it, and the worst head and block as multiples of what they may be."""

    name: str
    rr: float
    bound: float
    excess: float  # largest of error, head and block over what is allowed; above 1 is beyond the bounds
    where: str  # which of the three that is

    @property
    def passes(self) -> bool:
        return self.excess <= 1.0  # false for NaN


def operator(variant: Variant) -> Operator:
    """The checked-in operator of a variant of the package, otherwise one built from the record."""
    known = VARIANTS.get(variant.name) == variant
    made: Operator = getattr(ops, variant.name) if known else compile_hook.build(variant)
    return made


def kernels(variant: Variant) -> Operator:
    """The Triton kernels of a variant of the package, called whatever the device: for Triton's interpreter."""
    module = importlib.import_module(f"dplrgen.generated.{variant.name}")

    class Kernels(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, scale: float, *tensors: Tensor) -> tuple[Tensor, ...]:
            o, ht, *saved = module._forward_triton(*tensors, None, None, scale, True, True)
            ctx.scale = scale
            ctx.save_for_backward(*tensors, None, None, *saved)
            return o, ht

        @staticmethod
        def backward(ctx: Any, do: Tensor, dht: Tensor) -> tuple[Tensor | None, ...]:
            needs = (1 << (len(variant.inputs) + 1)) - 1
            return None, *module._backward_triton(do, dht, *ctx.saved_tensors, ctx.scale, needs)

    def call(*streams: Tensor, scale: float, initial_state: Tensor, **_: object) -> tuple[Tensor, Tensor]:
        made: tuple[Tensor, Tensor] = Kernels.apply(scale, *streams, initial_state)  # type: ignore[no-untyped-call]
        return made

    return call


def measure(variant: Variant, call: Operator, case: Case, dtype: torch.dtype, device: str) -> list[Measured]:
    """Outputs and every gradient of one call, held against the loop."""
    inputs, upstream = draw(variant, case, dtype, device)
    scale = case.K**-0.5

    def run(streams: Tensors, state: Tensor) -> tuple[Tensor, Tensor | None]:
        return call(*streams.values(), scale=scale, initial_state=state, output_final_state=True)

    def loop(streams: Tensors, state: Tensor) -> tuple[Tensor, Tensor | None]:
        return token_loop(variant, streams, state, scale)

    exact = {name: x.detach().cpu().double().requires_grad_() for name, x in inputs.items()}
    found = _results(run, inputs, upstream)
    wanted = _results(loop, exact, {name: x.cpu().double() for name, x in upstream.items()})
    return [_judged(variant, name, found[name].detach().cpu(), wanted, inputs, dtype) for name in wanted]


def _results(
    call: Callable[[Tensors, Tensor], tuple[Tensor, Tensor | None]], inputs: Tensors, upstream: Tensors
) -> Tensors:
    streams = {name: x for name, x in inputs.items() if name != "initial_state"}
    o, ht = call(streams, inputs["initial_state"])
    if ht is None:
        raise RuntimeError("the operator gave no final state")
    grads: tuple[Tensor | None, ...] = torch.autograd.grad(
        (o, ht), list(inputs.values()), (upstream["o"], upstream["ht"]), allow_unused=True
    )
    names = [f"d{name}" for name in streams] + ["dh0"]
    zeros = (torch.zeros_like(x) if dx is None else dx for x, dx in zip(inputs.values(), grads, strict=True))
    return {"o": o.detach(), "ht": ht.detach(), **dict(zip(names, zeros, strict=True))}


def _judged(
    variant: Variant, name: str, found: Tensor, wanted: Tensors, inputs: Tensors, dtype: torch.dtype
) -> Measured:
    gate = any(n.attr("role") == "gate" and name == f"d{n.attr('name')}" for n in variant.inputs)
    bound = _BOUNDS[dtype][0 if name in ("o", "ht") else 2 if gate else 1]
    reference = wanted[name]
    error, size = _rows(name, found.double() - reference), _rows(name, reference)
    # What the result's dtype cannot hold cannot be asked for, nor can decays of e^-40 and more.
    info = torch.finfo(found.dtype)
    floor = max(1e-20, info.smallest_normal * info.eps)
    extra = torch.zeros_like(size)
    if gate and name[1:] in _decay_gates(variant):
        read = (inputs[q].detach().cpu().double() * wanted[f"d{q}"] for q in _keys(variant.streams()["q"]))
        extra = _ALLOWANCE * _rows(name, _like(sum(read, torch.zeros(())), reference))
    heads = bound * _rms(size, (-2, -1)) + _rms(extra, (-2, -1)) + floor
    blocks = torch.stack([_rms(part, (-2, -1)) for part in torch.split(error, _ROWS, -2)], -1)
    excess = {
        "all of it": float(_rms(error)) / (bound * float(_rms(size)) + float(_rms(extra)) + floor),
        "a head": float((_rms(error, (-2, -1)) / heads).max()) / _HEAD,
        "a block of 16 rows": float((blocks / heads[..., None]).max()) / _BLOCK,
    }
    where = max(excess, key=lambda what: math.inf if math.isnan(excess[what]) else excess[what])
    rr = float(_rms(error)) / float(_rms(size)) if float(_rms(size)) else (0.0 if not float(_rms(error)) else math.inf)
    return Measured(name, rr, bound, excess[where], where)


def _rms(x: Tensor, dims: tuple[int, ...] | None = None) -> Tensor:
    return x.square().mean(dims if dims is not None else tuple(range(x.dim()))).sqrt()


def _rows(name: str, x: Tensor) -> Tensor:
    """[B, heads, rows, columns]: rows are tokens, or the key channels of a state."""
    if name in ("ht", "dh0"):
        return x
    return (x.unsqueeze(-1) if x.dim() == 3 else x).transpose(1, 2)


def _like(q_dq: Tensor, reference: Tensor) -> Tensor:
    """q dq for a decay a channel, its sum over K for one a head, at the reference's heads."""
    x = q_dq if reference.dim() == 4 else q_dq.sum(-1)
    return x.repeat_interleave(reference.shape[2] // x.shape[2], 2)


# ---------------------------------------------------------------------------------------------------------------------
# The table


def report(variant: Variant, device: str, dtypes: Sequence[torch.dtype]) -> tuple[str, bool]:
    """A table a dtype, the worst of a regime's shapes in each column, and whether all is within the bounds."""
    call = operator(variant)
    lines: list[str] = []
    good = True
    for dtype in dtypes:
        results: dict[str, list[Measured]] = {}
        for case in cases(variant):
            results.setdefault(case.regime, []).extend(measure(variant, call, case, dtype, device))
        good = good and all(m.passes for found in results.values() for m in found)
        lines += ["", *_table(f"{variant.name}, {_word(dtype)} on {_where(device)}", results)]
    lines += ["", "within the bounds" if good else "BEYOND THE BOUNDS"]
    return "\n".join(lines[1:]) + "\n", good


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _where(device: str) -> str:
    return "the CPU (generated PyTorch)" if device == "cpu" else f"{torch.cuda.get_device_name()} (Triton)"


def _table(title: str, results: Mapping[str, Sequence[Measured]]) -> Iterator[str]:
    yield f"{title}: rr against the float64 token loop, by decay"
    yield f"{'':16}" + "".join(f"{regime:>10}" for regime in results) + f"{'bound':>10}"
    names = dict.fromkeys(m.name for found in results.values() for m in found)
    loose = False
    for name in names:
        columns = {regime: [m for m in found if m.name == name] for regime, found in results.items()}
        worst = [max(ms, key=lambda m: math.inf if math.isnan(m.rr) else m.rr).rr for ms in columns.values()]
        every = [m for ms in columns.values() for m in ms]
        cells = "".join(f"{rr:10.1e}" for rr in worst)
        verdict = _verdict(columns)
        loose = loose or verdict.endswith(_LOOSE)
        yield f"{name:16}{cells}{every[0].bound:10.0e}  {verdict}"
    if loose:
        yield _LOOSE_MEANS


_LOOSE = "(absolute)"
_LOOSE_MEANS = f"{_LOOSE}: the reference is what larger terms leave when they cancel, or below what the dtype holds"


def _verdict(columns: Mapping[str, Sequence[Measured]]) -> str:
    beyond = [(regime, m) for regime, found in columns.items() for m in found if not m.passes]
    if not beyond:
        loose = any(m.rr > m.bound for found in columns.values() for m in found)
        return f"ok {_LOOSE}" if loose else "ok"
    regime, m = max(beyond, key=lambda pair: math.inf if math.isnan(pair[1].excess) else pair[1].excess)
    return f"BEYOND: {regime}, {m.where}, {m.excess:.1f} times what is allowed"
