"""Runs a program on torch tensors, in any dtype: the oracle for every pass.

Written for clarity: a decayed Gram product is formed from its definition, pair by pair, with the sum of log-decays over
the segment between, so it is right for any gate and independent of the tree that the emitted code uses.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache

import torch
from torch import Tensor

from dplrgen.ir import OPS, Axes, Node, Program, topological

__all__ = ["evaluate", "run"]


def evaluate(roots: list[Node], leaves: Mapping[str, Tensor | float]) -> dict[Node, Tensor]:
    """Values of ``roots`` and all below them; ``leaves`` by name, tensors of the leaf's axes with batch axes first."""
    reference = next(x for x in leaves.values() if isinstance(x, Tensor) and x.is_floating_point())
    values: dict[Node, Tensor] = {}
    order = topological(roots)
    sizes: dict[str, int] = {}
    for n in order:
        if n.op == "input":
            sizes |= zip(
                n.axes, torch.as_tensor(leaves[n.attr("name")]).shape[-len(n.axes) :] if n.axes else (), strict=True
            )
    for n in order:
        if n.op in ("input", "param"):
            values[n] = torch.as_tensor(leaves[n.attr("name")], dtype=reference.dtype)
        elif n.op == "const":
            values[n] = torch.tensor(n.attr("value"), dtype=reference.dtype)
        elif n.op == "spread":
            x, shape = _align(values[n.args[0]], n.args[0].axes, n.axes), [sizes[a] for a in n.axes]
            values[n] = x.expand([*x.shape[: x.dim() - len(shape)], *shape])
        else:
            values[n] = _apply(n, [values[a] for a in n.args], reference)
    return values


def run(program: Program, leaves: Mapping[str, Tensor | float]) -> dict[str, Tensor]:
    """One chunk: outputs and the next carried values by name."""
    values = evaluate(program.roots(), leaves)
    out = {label: values[n] for label, n in program.outputs}
    return out | {state.attr("name"): values[n] for state, n, _ in program.carried}


def _apply(n: Node, args: list[Tensor], reference: Tensor) -> Tensor:
    if OPS[n.op].elementwise:
        operands = [_align(x, a.axes, n.axes) for x, a in zip(args, n.args, strict=True)]
        return _elementwise(n.op)(*operands)
    return _TILE[n.op](n, args)


@cache
def _elementwise(op: str) -> Callable[..., Tensor]:
    spec = OPS[op]
    names = [f"x{i}" for i in range(spec.arity)]
    made: Callable[..., Tensor] = eval(f"lambda {', '.join(names)}: {spec.torch.format(*names)}", {"torch": torch})
    return made


def _align(x: Tensor, axes: Axes, out: Axes) -> Tensor:
    if len(axes) == 1 and len(out) == 2:
        return x.unsqueeze(-1) if axes[0] == out[0] else x.unsqueeze(-2)
    return x


def _triangle(x: Tensor, strict: bool) -> Tensor:
    return torch.tril(x, -1 if strict else 0)


def _segments(g: Tensor, left: str) -> Tensor:
    """Sums of g [..., C, K] over j+1..i (to) or j+1..i-1 (before): [..., C, C, K], 0 where the segment is empty."""
    size = g.shape[-2]
    i, j, m = (torch.arange(size, device=g.device).view(shape) for shape in ((-1, 1, 1), (1, -1, 1), (1, 1, -1)))
    inside = (m > j) & ((m <= i) if left == "to" else (m < i))
    return torch.einsum("ijm,...mk->...ijk", inside.to(g.dtype), g)


def _pairs(n: Node, g: Tensor) -> Tensor:
    size = g.shape[-2]
    decay = torch.exp(_segments(g, n.attr("left")))
    keep = torch.ones(size, size, dtype=torch.bool, device=g.device).tril(-1 if n.attr("strict") else 0)
    return torch.where(keep[..., None], decay, torch.zeros_like(decay))


def _gram(n: Node, args: list[Tensor]) -> Tensor:
    x, y, g = args
    return torch.einsum("...ik,...jk,...ijk->...ij", x, y, _pairs(n, _wide(g, n.args[2].axes)))


def _gram_dx(n: Node, args: list[Tensor]) -> Tensor:
    d, y, g = args
    return torch.einsum("...ij,...jk,...ijk->...ik", d, y, _pairs(n, _wide(g, n.args[2].axes)))


def _gram_dy(n: Node, args: list[Tensor]) -> Tensor:
    d, x, g = args
    return torch.einsum("...ij,...ik,...ijk->...jk", d, x, _pairs(n, _wide(g, n.args[2].axes)))


def _gram_gain(n: Node, args: list[Tensor]) -> Tensor:
    d, x, y, g = args
    return x * torch.einsum("...ij,...jk,...ijk->...ik", d, y, _pairs(n, _wide(g, n.args[3].axes)))


def _gram_loss(n: Node, args: list[Tensor]) -> Tensor:
    d, x, y, g = args
    return y * torch.einsum("...ij,...ik,...ijk->...jk", d, x, _pairs(n, _wide(g, n.args[3].axes)))


def _wide(g: Tensor, axes: Axes) -> Tensor:
    return g.unsqueeze(-1) if axes == ("C",) else g


def _running(n: Node, args: list[Tensor]) -> Tensor:
    over, dim = n.attr("over"), -len(n.args[0].axes)
    x = args[0].movedim(dim, -1)
    size = x.shape[-1]
    if over == "all":
        return x.sum(-1)
    r, i = torch.arange(size, device=x.device).view(-1, 1), torch.arange(size, device=x.device)
    keep = {"to": i <= r, "before": i < r, "after": i > r, "from": i >= r}[over]
    return torch.where(keep, x.unsqueeze(-2), torch.zeros((), dtype=x.dtype)).sum(-1).movedim(-1, dim)


def _matmul(n: Node, args: list[Tensor]) -> Tensor:
    x, y = args
    return (x.mT if n.attr("tx") else x) @ (y.mT if n.attr("ty") else y)


def _lower(n: Tensor) -> Tensor:
    return torch.eye(n.shape[-1], dtype=n.dtype, device=n.device) + n


def _solve(n: Node, args: list[Tensor]) -> Tensor:
    solved: Tensor = torch.linalg.solve_triangular(_lower(args[0]), args[1], upper=False, unitriangular=True)
    return solved


def _solve_t(n: Node, args: list[Tensor]) -> Tensor:
    solved: Tensor = torch.linalg.solve_triangular(_lower(args[0]).mT, args[1], upper=True, unitriangular=True)
    return solved


def _inverse(n: Node, args: list[Tensor]) -> Tensor:
    identity = torch.eye(args[0].shape[-1], dtype=args[0].dtype, device=args[0].device).expand_as(args[0])
    solved: Tensor = torch.linalg.solve_triangular(_lower(args[0]), identity, upper=False, unitriangular=True)
    return solved


def _sum(n: Node, args: list[Tensor]) -> Tensor:
    axes: Axes = n.args[0].axes
    axis = n.attr("axis")
    dim = -1 if axes.count(axis) == 2 else axes.index(axis) - len(axes)
    return args[0].sum(dim)


def _spread(n: Node, args: list[Tensor]) -> Tensor:
    return _align(args[0], n.args[0].axes, n.axes)  # broadcasting does the rest


def _pair(n: Node, args: list[Tensor]) -> Tensor:
    return _pairs(n, args[0].unsqueeze(-1)).squeeze(-1)


_TILE: dict[str, Callable[[Node, list[Tensor]], Tensor]] = {
    "sum": _sum,
    "spread": _spread,
    "valid": lambda n, args: args[0],
    "matmul": _matmul,
    "mask": lambda n, args: _triangle(args[0], n.attr("strict")),
    "outer": lambda n, args: args[0].unsqueeze(-1) * args[1].unsqueeze(-2),
    "columns": lambda n, args: args[0] * args[1].unsqueeze(-2),
    "diagonal": lambda n, args: args[0].diagonal(dim1=-2, dim2=-1),
    "run": _running,
    "gram": _gram,
    "gram_dx": _gram_dx,
    "gram_dy": _gram_dy,
    "gram_gain": _gram_gain,
    "gram_loss": _gram_loss,
    "pair": _pair,
    "solve": _solve,
    "solve_t": _solve_t,
    "inverse": _inverse,
}
