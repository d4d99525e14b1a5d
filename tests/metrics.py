"""How a result is judged: rr(x) = rms(x - ref) / rms(ref) against the float64 loop on the same rounded inputs.

Bounds by the dtype of q, k, v and by the kind of tensor; and, since one wrong row hides in a whole-tensor figure, every
(batch, head) within twice the bound and every block of 16 rows within ten times the bound of its head. The gradient of
g may be off by 1e-5 rms(q dq) more: at strong decay it is what is left where far larger terms cancel.

A result is a dict with `o`, `ht` and `dq`, `dk`, ... named after the streams, `dh0` for the initial state.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from oracles import GATES, ORACLES, SIGNATURES, computing_eps, names
from torch import Tensor

Result = dict[str, Tensor]

# dtype: (o and ht, gradients of q, k, v and the like, gradients of gates)
BOUNDS: dict[torch.dtype, tuple[float, float, float]] = {
    torch.float64: (1e-10, 1e-10, 1e-9),
    torch.float32: (1e-4, 1e-4, 1e-3),
    torch.bfloat16: (5e-3, 8e-3, 2e-2),
    torch.float16: (5e-3, 8e-3, 2e-2),
}
GATE_SLACK = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 1e-5, torch.float16: 1e-5}
"""What a gate's gradient may be off by, as a part of rms(q dq)."""

FLOOR = {torch.float64: 1e-40, torch.float32: 1e-20, torch.bfloat16: 1e-20, torch.float16: 1e-20}
"""An error below this is none: such references are decays of e^-40 and more, on their way to 0."""

HEAD_FACTOR, BLOCK_FACTOR, BLOCK_ROWS = 2.0, 10.0, 16


def bound(key: str, dtype: torch.dtype) -> float:
    """The bound on rr of one tensor, by its kind."""
    outputs, gradients, gates = BOUNDS[dtype]
    if key in ("o", "ht"):
        return outputs
    return gates if key[1:] in GATES else gradients


def rms(x: Tensor) -> float:
    return x.double().square().mean().sqrt().item() if x.numel() else 0.0


def rr(x: Tensor, ref: Tensor) -> float:
    """rms(x - ref) / rms(ref); 0 where both are 0, infinite where only the reference is."""
    error, size = rms(x.double() - ref.double()), rms(ref)
    if math.isnan(error):
        return math.inf
    if size == 0.0:
        return 0.0 if error == 0.0 else math.inf
    return error / size


def worst(got: Result, ref: Result) -> dict[str, float]:
    """rr of every tensor, by name."""
    return {key: rr(got[key], ref[key]) for key in ref}


def backward_of(o: Tensor, ht: Tensor | None, do: Tensor | None, dht: Tensor | None, leaves: Sequence[Tensor]):
    """The gradients of <o, do> + <ht, dht>, zeros for a leaf that nothing reaches."""
    pairs = [(y, dy) for y, dy in ((o, do), (ht, dht)) if dy is not None and y is not None and y.requires_grad]
    outputs, cotangents = [y for y, _ in pairs], [dy.to(y.dtype) for y, dy in pairs]
    grads = torch.autograd.grad(outputs, list(leaves), cotangents, allow_unused=True)
    return [torch.zeros_like(x) if dx is None else dx for x, dx in zip(leaves, grads, strict=True)]


def collect(
    fn: Callable[..., tuple[Tensor, Tensor | None]],
    name: str,
    streams: Sequence[Tensor],
    h0: Tensor | None,
    do: Tensor | None,
    dht: Tensor | None,
    scale: float | None = None,
    **options: object,
) -> Result:
    """Forward and backward of `fn(*streams, scale=, initial_state=, **options)` as a result."""
    o, ht = fn(*streams, scale=scale, initial_state=h0, **options)
    leaves = [*streams] if h0 is None else [*streams, h0]
    keys = [f"d{n}" for n in names(name)] + ["dh0"] * (h0 is not None)
    grads = backward_of(o, ht, do, dht, leaves)
    state = {} if ht is None else {"ht": ht.detach()}
    return {"o": o.detach(), **state, **dict(zip(keys, grads, strict=True))}


def run(fn: Callable[..., tuple[Tensor, Tensor | None]], name: str, streams, h0, do, dht, scale=None) -> Result:
    """`collect` for an op of the API, the final state asked for."""
    return collect(fn, name, streams, h0, do, dht, scale, output_final_state=True)


def reference(name: str, streams, h0, do, dht, scale=None) -> Result:
    """The float64 loop, outputs and gradients, on the inputs as they were rounded."""
    exact = [x.detach().double().requires_grad_() for x in streams]
    state = None if h0 is None else h0.detach().double().requires_grad_()
    do, dht = (None if x is None else x.double() for x in (do, dht))
    return collect(ORACLES[name], name, exact, state, do, dht, scale, eps=computing_eps(streams[0].dtype))


def check(name: str, got: Result, ref: Result, dtype: torch.dtype, streams: Sequence[Tensor]) -> list[str]:
    """What is wrong with a result, a line each; nothing if it is right."""
    failures = [f"{key}: missing" for key in ref if key not in got] + [
        f"{key}: unexpected" for key in got if key not in ref
    ]
    q_dq = streams[0].detach().double() * ref["dq"] if "dq" in ref else None
    shapes = dict(SIGNATURES[name])
    for key, want in ref.items():
        if key not in got:
            continue
        have = got[key]
        if have.shape != want.shape:
            failures.append(f"{key}: shape {list(have.shape)} instead of {list(want.shape)}")
        elif not bool(torch.isfinite(have).all()):
            count = int((~torch.isfinite(have)).sum())
            failures.append(f"{key}: {count} of {have.numel()} elements are not finite")
        else:
            slack = _gate_slack(key, shapes, want, q_dq, dtype)
            failures += _judge(key, have, want, bound(key, dtype), slack, dtype)
    return failures


def _gate_slack(
    key: str, shapes: dict[str, str], ref: Tensor, q_dq: Tensor | None, dtype: torch.dtype
) -> Tensor | None:
    """What dg may be off by beside its bound, `[B, T, HV, ..]`: a part of q dq, summed over K for a decay a head."""
    if key != "dg" or q_dq is None:
        return None
    per_head = q_dq if shapes["g"].endswith("K") else q_dq.sum(-1)
    return GATE_SLACK[dtype] * per_head.repeat_interleave(ref.shape[2] // per_head.shape[2], dim=2)


def _heads_first(key: str, x: Tensor) -> Tensor:
    """`[B, heads, rows, rest]`: rows are tokens, or the K rows of a state."""
    if key in ("ht", "dh0"):
        return x
    return (x.unsqueeze(-1) if x.ndim == 3 else x).transpose(1, 2)


def _blocks(x: Tensor) -> Tensor:
    """`[B, heads, blocks]`: the mean square of each block of 16 rows, the last one possibly short."""
    squares = x.square().mean(-1)
    return torch.stack([block.mean(-1) for block in squares.split(BLOCK_ROWS, dim=-1)], dim=-1)


def _judge(key: str, got: Tensor, ref: Tensor, limit: float, slack: Tensor | None, dtype: torch.dtype) -> list[str]:
    # A gradient comes in its input's dtype; what that cannot hold cannot be asked for. float32 flushes near 1e-38.
    floor = max(FLOOR[dtype], torch.finfo(got.dtype).smallest_normal * torch.finfo(got.dtype).eps)
    error = _heads_first(key, got.double() - ref.double())
    size = _heads_first(key, ref.double())
    allowed = limit * size.square().mean((-2, -1)).sqrt() + floor
    whole = limit * rms(size) + floor
    if slack is not None:
        extra = _heads_first(key, slack)
        allowed = allowed + extra.square().mean((-2, -1)).sqrt()
        whole += rms(extra)

    failures = []
    if (found := rms(error)) > whole:
        failures.append(
            f"{key}: rr {rr(got, ref):.2e}, bound {limit:.0e} (rms of error {found:.2e}, of ref {rms(ref):.2e})"
        )
    for what, squares, factor in (
        ("(batch, head)", error.square().mean((-2, -1)), HEAD_FACTOR),
        ("(batch, head, block of 16 rows)", _blocks(error), BLOCK_FACTOR),
    ):
        scale = allowed if squares.ndim == 2 else allowed.unsqueeze(-1)
        over = squares.sqrt() / scale
        if over.max() > factor:
            place = tuple(int(i) for i in torch.unravel_index(over.argmax(), over.shape))
            failures.append(
                f"{key}: {over.max().item():.1f} times the bound of its head at {what} {place}, limit {factor:g}"
            )
    return failures
