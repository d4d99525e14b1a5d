"""The formulas of docs/derivation.md as plain PyTorch, one head at a time, independent of the package.

Everything here takes one head in the layout of the public functions: ``q, k, a, b, d, g`` are ``[T, K]``, ``v`` and
``do`` are ``[T, V]``, states are ``[K, V]``. Inside, the state is ``S``, ``[V, K]``, as in the formulas.

Three forms of the same function, each with its gradient:

* ``token_loop``: the recurrence itself; autograd through it is the reference for every gradient;
* ``chunk_forward`` and ``chunk_backward``: the closed formulas with ``xL = x * G`` and ``xR = x / G``. They divide by
  the decay, so they are a check for gates whose sum over a chunk stays above about -300 in float64, not a method;
* ``tree_forward`` and ``tree_backward``: the same with every exponent a sum of gates over a segment, never positive.
  They hold for any gate, in float32 too.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

STATE_AFTER = "dW with the state after the chunk"
NO_STATE_TERM = "dK and dA without the term through the state"
QUERY_GRADIENT = "dB as the gradient of the query"

GRADIENTS = ("dq", "dk", "dv", "da", "db", "dg", "dh0")


# The recurrence


def token_loop(
    q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, g: Tensor, h0: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Return ``(o, ht)`` of ``S <- S Diag(exp g) (I - b a^T) + v k^T``, ``o = scale * S q``, a token at a time."""
    S, rows = h0.mT, []
    for t in range(q.shape[0]):
        decayed = S * g[t].exp()
        S = decayed - torch.outer(decayed @ b[t], a[t]) + torch.outer(v[t], k[t])
        rows.append(scale * S @ q[t])
    return torch.stack(rows), S.mT


def token_loop_absorbed(
    q: Tensor, k: Tensor, v: Tensor, a: Tensor, d: Tensor, g: Tensor, h0: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Return ``(o, ht)`` of ``S <- S (Diag(exp g) - d a^T) + v k^T``, ``o = scale * S q``, a token at a time."""
    S, rows = h0.mT, []
    for t in range(q.shape[0]):
        S = S * g[t].exp() - torch.outer(S @ d[t], a[t]) + torch.outer(v[t], k[t])
        rows.append(scale * S @ q[t])
    return torch.stack(rows), S.mT


def autograd_of(loop, streams: dict[str, Tensor], do: Tensor, dht: Tensor, scale: float) -> dict[str, Tensor]:
    """Return ``d<name>`` for every entry of ``streams``, by autograd through ``loop(**streams, scale=scale)``."""
    leaves = {name: x.detach().clone().requires_grad_() for name, x in streams.items()}
    o, ht = loop(**leaves, scale=scale)
    grads = torch.autograd.grad((o, ht), tuple(leaves.values()), (do, dht))
    return {f"d{name}": grad for name, grad in zip(leaves, grads, strict=True)}


# The closed chunk form: E = F^-1, W, Cc, and xR = x / G


@dataclass(frozen=True)
class Chunk:
    """One chunk of the closed form: its inputs, the state before and after it, and what lies between."""

    q: Tensor  # the scaled query
    k: Tensor
    v: Tensor
    a: Tensor
    b: Tensor
    G: Tensor
    S: Tensor
    QL: Tensor
    KR: Tensor
    AR: Tensor
    BL: Tensor
    L: Tensor
    E: Tensor
    W: Tensor
    V2: Tensor
    O: Tensor  # noqa: E741  (the name of the formulas)
    S_next: Tensor


def chunk_of(q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, g: Tensor, S: Tensor, scale: float) -> Chunk:
    """Return the closed chunk form of one chunk with ``S``, ``[V, K]``, the state before it."""
    G = g.cumsum(0).exp()
    QL, KR, AR, BL = scale * q * G, k / G, a / G, b * G
    return _assemble(scale * q, k, v, a, b, G, S, QL, KR, AR, BL, BL)


def _assemble(q, k, v, a, b, G, S, QL, KR, AR, BL, BL_of_gram) -> Chunk:
    """The lines that both the master form and the absorbed form share once the decayed streams are known."""
    L = (BL_of_gram @ KR.mT).tril(-1)
    F = torch.eye(len(q), dtype=q.dtype) + (BL_of_gram @ AR.mT).tril(-1)
    E = torch.linalg.inv(F)
    W = E @ BL
    V2 = -E @ L @ v - W @ S.mT
    O = QL @ S.mT + (QL @ KR.mT).tril() @ v + (QL @ AR.mT).tril() @ V2  # noqa: E741
    S_next = (S + v.mT @ KR + V2.mT @ AR) * G[-1]
    return Chunk(q, k, v, a, b, G, S, QL, KR, AR, BL, L, E, W, V2, O, S_next)


def chunk_forward(
    q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, g: Tensor, h0: Tensor, C: int, scale: float
) -> tuple[Tensor, Tensor]:
    """Return ``(o, ht)`` by the closed chunk form with chunks of ``C`` tokens; the last chunk may be shorter."""
    chunks = _chunks(q, k, v, a, b, g, h0, C, scale)
    return torch.cat([c.O for c in chunks]), chunks[-1].S_next.mT


def chunk_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    g: Tensor,
    h0: Tensor,
    do: Tensor,
    dht: Tensor,
    C: int,
    scale: float,
    *,
    printed: Collection[str] = (),
) -> dict[str, Tensor]:
    """Return ``dq, dk, dv, da, db, dg, dh0`` by the closed formulas, given ``do`` and ``dht``.

    ``printed`` names slips of the source documents to put back (``STATE_AFTER``, ``NO_STATE_TERM``,
    ``QUERY_GRADIENT``), for the tests that show each of them failing.
    """
    chunks = _chunks(q, k, v, a, b, g, h0, C, scale)
    dS, parts = dht.mT, []
    for c, dO in zip(reversed(chunks), reversed(do.split(C)), strict=True):
        grads, dS = _backward_of(c, dO, dS, scale, printed)
        parts.append(grads)
    stacked = {name: torch.cat([p[name] for p in reversed(parts)]) for name in parts[0]}
    return stacked | {"dh0": dS.mT}


def _chunks(q, k, v, a, b, g, h0, C, scale) -> list[Chunk]:
    S, chunks = h0.mT, []
    for streams in zip(*(x.split(C) for x in (q, k, v, a, b, g)), strict=True):
        chunks.append(chunk_of(*streams, S, scale))
        S = chunks[-1].S_next
    return chunks


def _backward_of(
    c: Chunk, dO: Tensor, dS_next: Tensor, scale: float, printed: Collection[str]
) -> tuple[dict[str, Tensor], Tensor]:
    """Return the gradients of one chunk's streams and ``dS``, the gradient of the state before it."""
    Gc, V1 = c.G[-1], c.v
    Pk, Pa = (c.QL @ c.KR.mT).tril(), (c.QL @ c.AR.mT).tril()
    dC = (c.AR * Gc) @ dS_next.mT + Pa.mT @ dO
    dV1 = (c.KR * Gc) @ dS_next.mT + Pk.mT @ dO
    dW = -dC @ (c.S_next if STATE_AFTER in printed else c.S)
    dE = -dC @ V1.mT @ c.L.mT + dW @ c.BL.mT
    dF = (-c.E.mT @ dE @ c.E.mT).tril(-1)
    X = (c.E.mT @ dC @ V1.mT).tril(-1)
    dPk, dPa = (dO @ V1.mT).tril(), (dO @ c.V2.mT).tril()
    through_state = 0.0 if NO_STATE_TERM in printed else 1.0

    dQL = dO @ c.S + dPk @ c.KR + dPa @ c.AR
    dBL = dQL if QUERY_GRADIENT in printed else c.E.mT @ dW - X @ c.KR + dF @ c.AR
    dKR = dPk.mT @ c.QL - X.mT @ c.BL + through_state * (V1 @ dS_next) * Gc
    dAR = dPa.mT @ c.QL + dF.mT @ c.BL + through_state * (c.V2 @ dS_next) * Gc
    dV = dV1 - c.L.mT @ c.E.mT @ dC

    dQ, dK, dA, dB = dQL * c.G, dKR / c.G, dAR / c.G, dBL * c.G
    dlogG = dQ * c.q + dB * c.b - dK * c.k - dA * c.a
    dlogG[-1] += (c.S_next * dS_next).sum(0)
    dS = -dC.mT @ c.W + dS_next * Gc + dO.mT @ c.QL
    return {"dq": scale * dQ, "dk": dK, "dv": dV, "da": dA, "db": dB, "dg": reverse_cumsum(dlogG)}, dS


def reverse_cumsum(x: Tensor) -> Tensor:
    """Return ``y_r = sum of x_i over i >= r`` along the rows."""
    return x.flip(0).cumsum(0).flip(0)


# The gate-absorbed form


def absorbed_chunk_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    d: Tensor,
    g: Tensor,
    h0: Tensor,
    C: int,
    scale: float,
    *,
    bare: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return ``(o, ht)`` of the absorbed form by chunks: ``BL_r = d_r * G_{r-1}``, nothing divided by alpha.

    ``bare=True`` puts back the slip of the source document: ``d`` without its decay in ``F`` and in ``Cc``.
    """
    S, rows = h0.mT, []
    for qc, kc, vc, ac, dc, gc in zip(*(x.split(C) for x in (q, k, v, a, d, g)), strict=True):
        G, before = gc.cumsum(0).exp(), (gc.cumsum(0) - gc).exp()
        BL = dc * before
        c = _assemble(scale * qc, kc, vc, ac, dc, G, S, scale * qc * G, kc / G, ac / G, BL, dc if bare else BL)
        rows.append(c.O)
        S = c.S_next
    return torch.cat(rows), S.mT


# The tree of reference rows


@dataclass(frozen=True)
class Level:
    """One level of the tree: which pairs it serves and which gates lie between a row and its reference row."""

    pairs: Tensor  # [n, n], 1 where row i is in the second half and row j in the first half of one block
    above: Tensor  # [n, n], row i of a second half picks the gates from after the reference row to i
    below: Tensor  # [n, n], row j of a first half picks the gates from after j to the reference row


def tree_levels(n: int, dtype: torch.dtype, *, exclusive: bool = False) -> Iterator[Level]:
    """Yield the levels with half-blocks of 1, 2, 4, ... rows; together they serve every pair ``i > j`` once.

    The reference row is the last row of the first half. With ``exclusive`` a row's own gate is left out of ``above``
    (the absorbed form, where the row carries ``G_{i-1}``).
    """
    row, half = torch.arange(n), 1
    while half < n:
        block = row // (2 * half)
        reference = block * 2 * half + half - 1
        second = row > reference
        gate, ref, r = row[None, :], reference[:, None], row[:, None]
        upto = gate < r if exclusive else gate <= r
        pairs = (block[:, None] == block[None, :]) & second[:, None] & ~second[None, :]
        above = second[:, None] & (gate > ref) & upto
        below = ~second[:, None] & (gate > r) & (gate <= ref)
        yield Level(pairs.to(dtype), above.to(dtype), below.to(dtype))
        half *= 2


def tree_gram(x: Tensor, y: Tensor, g: Tensor, *, diagonal: bool, exclusive: bool = False) -> Tensor:
    """Return ``P_ij = sum_k x_ik y_jk exp(sum of g_k over j+1..i)`` for ``i > j``, and ``x_i . y_i`` on the diagonal
    if asked for; no exponent taken is positive. ``exclusive`` sums over ``j+1..i-1``."""
    P = torch.diag((x * y).sum(1)) if diagonal else x.new_zeros(len(x), len(x))
    for level in tree_levels(len(x), x.dtype, exclusive=exclusive):
        above, below = (level.above @ g).exp(), (level.below @ g).exp()
        P = P + level.pairs * ((x * above) @ (y * below).mT)
    return P


def tree_gram_vjp(
    x: Tensor, y: Tensor, g: Tensor, dP: Tensor, *, diagonal: bool, exclusive: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Return ``dx, dy, dg`` of ``tree_gram``: the same levels, and the gate's gradient without a cancelling term.

    An exponent is ``above @ g``, so its share of ``dg`` is ``above^T @ (x * dx)`` with this level's ``dx`` alone.
    """
    on_diagonal = dP.diagonal()[:, None] if diagonal else 0.0
    dx, dy, dg = on_diagonal * y, on_diagonal * x, torch.zeros_like(g)
    for level in tree_levels(len(x), x.dtype, exclusive=exclusive):
        above, below = (level.above @ g).exp(), (level.below @ g).exp()
        D = level.pairs * dP
        dx_level = above * (D @ (y * below))
        dy_level = below * (D.mT @ (x * above))
        dx, dy = dx + dx_level, dy + dy_level
        dg = dg + level.above.mT @ (x * dx_level) + level.below.mT @ (y * dy_level)
    return dx, dy, dg


def tree_inverse(N: Tensor) -> Tensor:
    """Return ``(I + N)^-1`` of a strictly lower triangular ``N`` by doubling the inverted block at each level."""
    E = torch.eye(len(N), dtype=N.dtype)
    for level in tree_levels(len(N), N.dtype):
        E = E - E @ (level.pairs * N) @ E
    return E


# The solve form with the tree: what holds for every gate


@dataclass(frozen=True)
class TreeChunk:
    """One chunk of the solve form; ``prefix @ g`` and ``suffix @ g`` are the exponents to the chunk's two edges."""

    q: Tensor  # the scaled query
    k: Tensor
    v: Tensor
    a: Tensor
    b: Tensor
    g: Tensor
    S: Tensor
    prefix: Tensor
    suffix: Tensor
    QS: Tensor
    BS: Tensor
    KS: Tensor
    AS: Tensor
    Pk: Tensor
    Pa: Tensor
    L: Tensor
    F: Tensor
    V2: Tensor
    O: Tensor  # noqa: E741
    S_next: Tensor


def tree_chunk_of(
    q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, g: Tensor, S: Tensor, scale: float
) -> TreeChunk:
    """Return the solve form of one chunk with ``S``, ``[V, K]``, the state before it."""
    n, q = len(q), scale * q
    prefix, suffix = g.new_ones(n, n).tril(), g.new_ones(n, n).triu(1)
    from_start, to_end = (prefix @ g).exp(), (suffix @ g).exp()
    QS, BS, KS, AS = q * from_start, b * from_start, k * to_end, a * to_end
    Pk, Pa = tree_gram(q, k, g, diagonal=True), tree_gram(q, a, g, diagonal=True)
    L = tree_gram(b, k, g, diagonal=False)
    F = torch.eye(n, dtype=g.dtype) + tree_gram(b, a, g, diagonal=False)
    V2 = -torch.linalg.solve_triangular(F, L @ v + BS @ S.mT, upper=False, unitriangular=True)
    O = QS @ S.mT + Pk @ v + Pa @ V2  # noqa: E741
    S_next = S * g.sum(0).exp() + v.mT @ KS + V2.mT @ AS
    return TreeChunk(q, k, v, a, b, g, S, prefix, suffix, QS, BS, KS, AS, Pk, Pa, L, F, V2, O, S_next)


def tree_forward(
    q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, g: Tensor, h0: Tensor, C: int, scale: float
) -> tuple[Tensor, Tensor]:
    """Return ``(o, ht)`` by the solve form and the tree; right for any ``g <= 0``, in float32 too."""
    chunks = _tree_chunks(q, k, v, a, b, g, h0, C, scale)
    return torch.cat([c.O for c in chunks]), chunks[-1].S_next.mT


def tree_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    g: Tensor,
    h0: Tensor,
    do: Tensor,
    dht: Tensor,
    C: int,
    scale: float,
) -> dict[str, Tensor]:
    """Return ``dq, dk, dv, da, db, dg, dh0`` by reverse mode on the solve form; right for any ``g <= 0``."""
    chunks = _tree_chunks(q, k, v, a, b, g, h0, C, scale)
    dS, parts = dht.mT, []
    for c, dO in zip(reversed(chunks), reversed(do.split(C)), strict=True):
        grads, dS = _tree_backward_of(c, dO, dS, scale)
        parts.append(grads)
    stacked = {name: torch.cat([p[name] for p in reversed(parts)]) for name in parts[0]}
    return stacked | {"dh0": dS.mT}


def _tree_chunks(q, k, v, a, b, g, h0, C, scale) -> list[TreeChunk]:
    S, chunks = h0.mT, []
    for streams in zip(*(x.split(C) for x in (q, k, v, a, b, g)), strict=True):
        chunks.append(tree_chunk_of(*streams, S, scale))
        S = chunks[-1].S_next
    return chunks


def _tree_backward_of(c: TreeChunk, dO: Tensor, dS_next: Tensor, scale: float) -> tuple[dict[str, Tensor], Tensor]:
    from_start, to_end, whole = (c.prefix @ c.g).exp(), (c.suffix @ c.g).exp(), c.g.sum(0).exp()
    dV2 = c.AS @ dS_next.mT + c.Pa.mT @ dO
    dZ = torch.linalg.solve_triangular(c.F.mT, dV2, upper=True, unitriangular=True)
    dV = c.KS @ dS_next.mT + c.Pk.mT @ dO - c.L.mT @ dZ

    # what reaches a stream through the state, then what reaches it through a Gram product
    dq_S, db_S = (dO @ c.S) * from_start, -(dZ @ c.S) * from_start
    dk_S, da_S = (c.v @ dS_next) * to_end, (c.V2 @ dS_next) * to_end
    dq_k, dk_q, dg_qk = tree_gram_vjp(c.q, c.k, c.g, dO @ c.v.mT, diagonal=True)
    dq_a, da_q, dg_qa = tree_gram_vjp(c.q, c.a, c.g, dO @ c.V2.mT, diagonal=True)
    db_k, dk_b, dg_bk = tree_gram_vjp(c.b, c.k, c.g, -dZ @ c.v.mT, diagonal=False)
    db_a, da_b, dg_ba = tree_gram_vjp(c.b, c.a, c.g, -dZ @ c.V2.mT, diagonal=False)

    dg = c.prefix.mT @ (c.q * dq_S + c.b * db_S) + c.suffix.mT @ (c.k * dk_S + c.a * da_S)
    dg = dg + (c.S * whole * dS_next).sum(0) + dg_qk + dg_qa + dg_bk + dg_ba
    dS = dS_next * whole + dO.mT @ c.QS - dZ.mT @ c.BS
    grads = {
        "dq": scale * (dq_S + dq_k + dq_a),
        "dk": dk_S + dk_q + dk_b,
        "dv": dV,
        "da": da_S + da_q + da_b,
        "db": db_S + db_k + db_a,
        "dg": dg,
    }
    return grads, dS


# The clip


def log_rho(x: Tensor, y: Tensor) -> Tensor:
    """Return the logarithm of the spectral norm of ``I - x y^T``, rows of ``x`` and ``y`` being tokens.

    The safe form: ``n - x.y`` as half of ``n |x/|x| - y/|y||^2``, which is zero and not an ulp off zero where the two
    point the same way; the derivative of a square root at zero is zero; zero rows have finite gradients.
    """
    x_len, y_len = _length(x), _length(y)
    n = x_len * y_len
    gap = 0.5 * n * (_unit(x, x_len) - _unit(y, y_len)).square().sum(-1, keepdim=True)
    return torch.log(0.5 * (n + _root((n - 2) ** 2 + 4 * gap))).squeeze(-1)


def clip_gate(g: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Return ``min(g, -log rho)``, the clip active only where ``log rho > -g + 8 eps``."""
    bound = log_rho(x, y)[..., None]
    active = bound > -g + 8 * torch.finfo(g.dtype).eps
    return torch.where(active, -bound, g)


def _length(x: Tensor) -> Tensor:
    return _root(x.square().sum(-1, keepdim=True))


def _unit(x: Tensor, length: Tensor) -> Tensor:
    zero = length == 0
    return torch.where(zero, torch.zeros_like(x), x / torch.where(zero, torch.ones_like(length), length))


def _root(x: Tensor) -> Tensor:
    """The square root with derivative 0 at 0; the inner ``where`` keeps the unused branch finite for autograd."""
    positive = x > 0
    return torch.where(positive, torch.where(positive, x, torch.ones_like(x)).sqrt(), torch.zeros_like(x))
