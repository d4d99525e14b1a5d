"""Every statement of docs/derivation.md as a check, in plain PyTorch and independent of the package."""

from __future__ import annotations

import pytest
import torch
from formulas import (
    GRADIENTS,
    NO_STATE_TERM,
    QUERY_GRADIENT,
    STATE_AFTER,
    absorbed_chunk_forward,
    autograd_of,
    chunk_backward,
    chunk_forward,
    chunk_of,
    clip_gate,
    log_rho,
    reverse_cumsum,
    token_loop,
    token_loop_absorbed,
    tree_backward,
    tree_forward,
    tree_gram,
    tree_gram_vjp,
    tree_inverse,
    tree_levels,
)
from torch import Tensor
from torch.nn.functional import logsigmoid, normalize

T, K, V, C = 23, 6, 5, 8  # three chunks, the last one short
SCALE = 0.37
TIGHT = 1e-10


def draws(seed: int):
    """Return ``randn`` and ``unit`` (rows of length 1) in float64 on a generator of their own."""
    source = torch.Generator().manual_seed(seed)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=source, dtype=torch.float64)

    return randn, lambda *shape: normalize(randn(*shape), dim=-1)


def problem(seed: int = 0, T: int = T, K: int = K, V: int = V) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """Return streams and initial state of one head, and the gradients ``do`` and ``dht`` that arrive."""
    randn, unit = draws(seed)
    streams = {
        "q": unit(T, K),
        "k": unit(T, K),
        "v": randn(T, V),
        "a": unit(T, K),
        "b": unit(T, K) * randn(T, 1).sigmoid(),
        "g": logsigmoid(randn(T, K)),
        "h0": randn(K, V),
    }
    return streams, randn(T, V), randn(K, V)


def one_chunk(seed: int = 0):
    """Return the closed form of one full chunk of ``C`` tokens with a state before it."""
    streams, _, _ = problem(seed, T=C)
    h0 = streams.pop("h0")
    return chunk_of(**streams, S=h0.mT, scale=SCALE)


def error(x: Tensor, ref: Tensor) -> float:
    return ((x - ref).abs().max() / ref.abs().max().clamp(min=1)).item()


def rr(x: Tensor, ref: Tensor) -> float:
    x, ref = x.double(), ref.double()
    return ((x - ref).square().mean() / ref.square().mean()).sqrt().item()


def errors(got: dict[str, Tensor], ref: dict[str, Tensor]) -> dict[str, float]:
    assert set(got) == set(ref)
    return {name: error(got[name], ref[name]) for name in ref}


# The chunk form and its gradient


@pytest.mark.parametrize("size", [1, 3, C, 32])
@pytest.mark.parametrize("form", [chunk_forward, tree_forward])
def test_chunk_form_is_the_token_loop(form, size):
    streams, _, _ = problem()
    o, ht = form(**streams, C=size, scale=SCALE)
    o_ref, ht_ref = token_loop(**streams, scale=SCALE)
    assert error(o, o_ref) < TIGHT
    assert error(ht, ht_ref) < TIGHT


@pytest.mark.parametrize("size", [1, 3, C, 32])
@pytest.mark.parametrize("form", [chunk_backward, tree_backward])
def test_backward_formulas_are_autograd_through_the_token_loop(form, size):
    streams, do, dht = problem()
    got = form(**streams, do=do, dht=dht, C=size, scale=SCALE)
    ref = autograd_of(token_loop, streams, do, dht, SCALE)
    assert tuple(ref) == GRADIENTS
    assert max(errors(got, ref).values()) < TIGHT


def test_only_the_state_gradient_is_sequential():
    # With dS' of every chunk at hand, a chunk's stream gradients need nothing of any other chunk: the gradients of the
    # second chunk alone, from its own state before it and its own dS', are the rows of the full backward.
    streams, do, dht = problem()
    full = chunk_backward(**streams, do=do, dht=dht, C=C, scale=SCALE)
    h0 = streams.pop("h0")
    cut = {name: x.split(C) for name, x in streams.items()}
    first, second, third = ({name: x[i] for name, x in cut.items()} for i in range(3))
    _, before = chunk_forward(**first, h0=h0, C=C, scale=SCALE)
    _, after = chunk_forward(**second, h0=before, C=C, scale=SCALE)
    dafter = chunk_backward(**third, h0=after, do=do[2 * C :], dht=dht, C=C, scale=SCALE)["dh0"]
    alone = chunk_backward(**second, h0=before, do=do[C : 2 * C], dht=dafter, C=C, scale=SCALE)
    for name in GRADIENTS[:-1]:
        assert error(alone[name], full[name][C : 2 * C]) < TIGHT


# The slips of the source documents: the printed form fails, the corrected one holds


def slip_errors(printed: str) -> tuple[dict[str, float], dict[str, float]]:
    """Return the errors of the printed form and of the corrected form against autograd through the token loop."""
    streams, do, dht = problem()
    ref = autograd_of(token_loop, streams, do, dht, SCALE)
    wrong = chunk_backward(**streams, do=do, dht=dht, C=C, scale=SCALE, printed=[printed])
    right = chunk_backward(**streams, do=do, dht=dht, C=C, scale=SCALE)
    return errors(wrong, ref), errors(right, ref)


@pytest.mark.parametrize(
    ("printed", "spoiled"),
    [
        pytest.param(STATE_AFTER, {"da", "db", "dg"}, id="slip_1_dw_takes_the_state_before_the_chunk"),
        pytest.param(NO_STATE_TERM, {"dk", "da", "dg"}, id="slip_2_dk_and_da_have_a_term_through_the_state"),
        pytest.param(QUERY_GRADIENT, {"db", "dg"}, id="slip_3_db_is_its_own_gradient"),
    ],
)
def test_slips_of_the_backward(printed, spoiled):
    wrong, right = slip_errors(printed)
    assert max(right.values()) < TIGHT
    assert {name for name, e in wrong.items() if e > 1e-2} == spoiled
    assert max(e for name, e in wrong.items() if name not in spoiled) < TIGHT


def test_slip_2_is_invisible_when_nothing_comes_through_the_state():
    # One chunk and no gradient on the final state: the missing term is zero, so such a test would not find the slip.
    streams, do, dht = problem()
    nothing = torch.zeros_like(dht)
    ref = autograd_of(token_loop, streams, do, nothing, SCALE)
    wrong = chunk_backward(**streams, do=do, dht=nothing, C=T, scale=SCALE, printed=[NO_STATE_TERM])
    assert max(errors(wrong, ref).values()) < TIGHT


def test_slip_4_absorbed_direction_carries_the_exclusive_decay():
    streams, _, _ = problem()
    streams["d"] = streams.pop("b")
    o_ref, ht_ref = token_loop_absorbed(**streams, scale=SCALE)
    o, ht = absorbed_chunk_forward(**streams, C=C, scale=SCALE)
    assert max(error(o, o_ref), error(ht, ht_ref)) < TIGHT
    o, ht = absorbed_chunk_forward(**streams, C=C, scale=SCALE, bare=True)
    assert min(error(o, o_ref), error(ht, ht_ref)) > 1e-2


# The solve form and its gradient


def test_solve_form_is_the_inverse_form():
    c = one_chunk()
    F = torch.linalg.inv(c.E)
    V2 = -torch.linalg.solve_triangular(F, c.L @ c.v + c.BL @ c.S.mT, upper=False)
    assert error(V2, c.V2) < TIGHT


def test_vjp_of_the_solve():
    # V2 = -F^-1 Y: with dZ = F^-T dV2, dY = -dZ and dF = -dZ V2^T where F is free (below its diagonal).
    randn, _ = draws(3)
    N, Y, dV2 = randn(C, C), randn(C, V), randn(C, V)
    leaves = [x.requires_grad_() for x in (N, Y)]
    F = torch.eye(C, dtype=N.dtype) + N.tril(-1)
    V2 = -torch.linalg.solve_triangular(F, Y, upper=False)
    dN_ref, dY_ref = torch.autograd.grad(V2, leaves, dV2)
    dZ = torch.linalg.solve_triangular(F.mT, dV2, upper=True)
    assert error(-dZ, dY_ref) < TIGHT
    assert error((-dZ @ V2.mT).tril(-1), dN_ref) < TIGHT


def test_vjp_of_the_solve_is_the_gradient_of_the_inverse_form():
    c = one_chunk()
    randn, _ = draws(4)
    dC = randn(C, V)  # what arrives at V2
    dZ = c.E.mT @ dC
    dW = -dC @ c.S
    dE = -dC @ c.v.mT @ c.L.mT + dW @ c.BL.mT
    dF = -c.E.mT @ dE @ c.E.mT
    assert error(-dZ @ c.V2.mT, dF) < TIGHT  # the two agree before the mask, too
    assert error(-dZ @ c.S, c.E.mT @ dW) < TIGHT
    assert error(-dZ.mT @ c.BL, -dC.mT @ c.W) < TIGHT
    assert error(-dZ @ c.v.mT, -c.E.mT @ dC @ c.v.mT) < TIGHT


# The gradient of the gate


def test_gate_gradient_is_the_reverse_sum_within_the_chunk():
    # Each sum ends at its chunk's last row; the term of the state there stands for every later chunk.
    streams, do, dht = problem()
    ref = autograd_of(token_loop, streams, do, dht, SCALE)
    balance = sum(s * streams[n] * ref[f"d{n}"] for n, s in (("q", 1), ("b", 1), ("k", -1), ("a", -1)))
    whole = balance.clone()
    _, ht = token_loop(**streams, scale=SCALE)
    whole[-1] += (ht * dht).sum(1)
    assert error(reverse_cumsum(whole), ref["dg"]) < TIGHT  # the whole sequence as one chunk

    head = {name: x[:C] if name != "h0" else x for name, x in streams.items()}
    _, h1 = token_loop(**head, scale=SCALE)
    tail = {name: x[C:] if name != "h0" else h1 for name, x in streams.items()}
    dh1 = autograd_of(token_loop, tail, do[C:], dht, SCALE)["dh0"]
    part = balance[:C].clone()
    part[-1] += (h1 * dh1).sum(1)
    assert error(reverse_cumsum(part), ref["dg"][:C]) < TIGHT


def test_gate_gradient_by_segments_survives_strong_decay():
    # At g = -20 the pairs (i, i), whose gradient must cancel, are e^20 times larger than all that is left.
    randn, unit = draws(5)
    x, y, dP = unit(64, 16), unit(64, 16), randn(64, 64).tril()
    g = torch.full((64, 16), -20.0, dtype=torch.float64)
    *_, ref = tree_gram_vjp(x, y, g, dP, diagonal=True)
    dx, dy, dg = tree_gram_vjp(x.float(), y.float(), g.float(), dP.float(), diagonal=True)
    assert rr(dg, ref) < 1e-6
    assert rr(reverse_cumsum(x.float() * dx - y.float() * dy), ref) > 1


# The tree of reference rows


def pair_exponents(g: Tensor, *, exclusive: bool = False) -> Tensor:
    """Return ``[n, n, K]``: the sum of g over ``j+1..i`` (``j+1..i-1`` if exclusive), each over its own segment."""
    row = torch.arange(len(g))
    i, j, t = row[:, None, None], row[None, :, None], row[None, None, :]
    inside = (t > j) & ((t < i) if exclusive else (t <= i))
    return inside.to(g.dtype) @ g


def gram_by_pairs(x: Tensor, y: Tensor, g: Tensor, *, exclusive: bool = False) -> Tensor:
    return torch.einsum("ik,jk,ijk->ij", x, y, pair_exponents(g, exclusive=exclusive).exp())


def hard_gates(kind: str, n: int, K: int) -> Tensor:
    randn, _ = draws(7)
    mild = logsigmoid(randn(n, K))
    if kind == "constant -20":
        return torch.full_like(mild, -20.0)
    if kind == "spikes of -1e4":
        return torch.where(randn(n, K) < -1.28, torch.full_like(mild, -1e4), mild)
    return {"mild": mild, "zero": torch.zeros_like(mild)}[kind]


@pytest.mark.parametrize("n", [1, 2, 13, 16, 64])
@pytest.mark.parametrize("exclusive", [False, True])
def test_tree_serves_every_pair_once_and_no_exponent_is_positive(n, exclusive):
    levels = list(tree_levels(n, torch.float64, exclusive=exclusive))
    assert torch.equal(sum((level.pairs for level in levels), torch.zeros(n, n)), torch.ones(n, n).tril(-1))
    for level in levels:
        for i, j in level.pairs.nonzero().tolist():
            segment = torch.zeros(n)
            segment[j + 1 : i if exclusive else i + 1] = 1
            assert torch.equal(level.above[i] + level.below[j], segment.double())
    # Sums of gates with 0/1 weights: non-positive wherever the gates are.
    assert all(bool(((m == 0) | (m == 1)).all()) for level in levels for m in (level.above, level.below))


@pytest.mark.parametrize("n", [1, 13, 32])
@pytest.mark.parametrize("exclusive", [False, True])
@pytest.mark.parametrize("kind", ["mild", "constant -20", "spikes of -1e4", "zero"])
def test_tree_gram_and_its_vjp_are_the_direct_ones(kind, exclusive, n):
    randn, unit = draws(8)
    diagonal = not exclusive
    x, y, g = unit(n, K), unit(n, K), hard_gates(kind, n, K)
    dP = randn(n, n).tril(0 if diagonal else -1)
    leaves = [z.requires_grad_() for z in (x, y, g)]
    direct = gram_by_pairs(x, y, g, exclusive=exclusive).tril(0 if diagonal else -1)
    ref = torch.autograd.grad(direct, leaves, dP)
    x, y, g = (z.detach() for z in leaves)
    P = tree_gram(x, y, g, diagonal=diagonal, exclusive=exclusive)
    got = tree_gram_vjp(x, y, g, dP, diagonal=diagonal, exclusive=exclusive)
    assert error(P, direct) < TIGHT
    for z, z_ref in zip(got, ref, strict=True):
        assert error(z, z_ref) < TIGHT


def test_tree_gram_is_the_form_with_the_inverse_decay_where_that_exists():
    _, unit = draws(9)
    x, y, g = unit(C, K), unit(C, K), hard_gates("mild", C, K)
    G = g.cumsum(0).exp()
    assert error(tree_gram(x, y, g, diagonal=True), ((x * G) @ (y / G).mT).tril()) < TIGHT


@pytest.mark.parametrize("kind", ["constant -20", "spikes of -1e4"])
def test_tree_holds_in_float32_where_the_inverse_decay_overflows(kind):
    randn, unit = draws(10)
    n, K = 64, 16
    x, y, g, dP = (z.float() for z in (unit(n, K), unit(n, K), hard_gates(kind, n, K), randn(n, n).tril()))
    wide = [z.double() for z in (x, y, g, dP)]
    assert rr(tree_gram(x, y, g, diagonal=True), gram_by_pairs(*wide[:3]).tril()) < 1e-6
    got = tree_gram_vjp(x, y, g, dP, diagonal=True)
    ref = tree_gram_vjp(*wide, diagonal=True)  # equal to the direct one in float64, by the test above
    for z, z_ref in zip(got, ref, strict=True):
        assert rr(z, z_ref) < 1e-6
    G = g.cumsum(0).exp()
    assert not torch.isfinite(((x * G) @ (y / G).mT).tril()).all()


def test_exponents_are_sums_over_the_segment_not_differences():
    # Float32 near -1e5 has steps of 2^-7: a difference of two such sums is off by that much in the exponent.
    _, unit = draws(11)
    n, K = 64, 16
    x, y, g = (z.float() for z in (unit(n, K), unit(n, K), hard_gates("spikes of -1e4", n, K)))
    ref = gram_by_pairs(x.double(), y.double(), g.double()).tril(-1)
    total = g.cumsum(0)
    by_difference = torch.einsum("ik,jk,ijk->ij", x, y, (total[:, None] - total[None]).clamp(max=0).exp()).tril(-1)
    assert rr(by_difference, ref) > 1e-4
    assert rr(tree_gram(x, y, g, diagonal=False), ref) < 1e-6


@pytest.mark.parametrize("kind", ["constant -20", "spikes of -1e4", "zero"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_tree_form_holds_whole_at_hard_gates(kind, dtype):
    streams, do, dht = problem(12, T=100, K=16, V=16)
    streams["g"] = hard_gates(kind, 100, 16)
    streams["b"] = 0.5 * streams["a"]  # the erase direction that does not expand at g = 0
    narrow = {name: x.to(dtype) for name, x in streams.items()}
    do, dht = do.to(dtype), dht.to(dtype)
    wide = {name: x.double() for name, x in narrow.items()}
    o, ht = tree_forward(**narrow, C=64, scale=SCALE)
    o_ref, ht_ref = token_loop(**wide, scale=SCALE)
    got = tree_backward(**narrow, do=do, dht=dht, C=64, scale=SCALE)
    ref = autograd_of(token_loop, wide, do.double(), dht.double(), SCALE)
    bound = TIGHT if dtype == torch.float64 else 2e-6
    assert max(rr(o, o_ref), rr(ht, ht_ref)) < bound
    assert max(rr(got[name], ref[name]) for name in GRADIENTS) < bound


@pytest.mark.parametrize("n", [1, 13, 64])
def test_inverse_doubles_at_the_levels_of_the_tree(n):
    randn, _ = draws(13)
    N = 0.2 * randn(n, n).tril(-1)
    assert error(tree_inverse(N), torch.linalg.inv(torch.eye(n, dtype=N.dtype) + N)) < TIGHT


def test_inverse_is_exact_for_equal_keys():
    # beta = 1 and all keys equal: F is all ones below the diagonal and its inverse has -1 on the first subdiagonal
    # only, while the powers of N grow like binomial coefficients.
    N = torch.ones(64, 64, dtype=torch.float64).tril(-1)
    expected = torch.eye(64, dtype=torch.float64) - torch.diag(torch.ones(63, dtype=torch.float64), -1)
    assert torch.equal(tree_inverse(N), expected)


# The exclusive form


def test_absorbed_form_is_the_master_form_with_the_decay_divided_out():
    streams, do, dht = problem()
    absorbed = {("d" if name == "b" else name): x for name, x in streams.items()}
    absorbed["d"] = streams["b"] * streams["g"].exp()
    o, ht = absorbed_chunk_forward(**absorbed, C=C, scale=SCALE)
    o_ref, ht_ref = token_loop(**streams, scale=SCALE)
    assert max(error(o, o_ref), error(ht, ht_ref)) < TIGHT
    # d = b alpha, so the chain rule turns one set of gradients into the other.
    got = autograd_of(token_loop_absorbed, absorbed, do, dht, SCALE)
    ref = autograd_of(token_loop, streams, do, dht, SCALE)
    assert error(got["dd"] * streams["g"].exp(), ref["db"]) < TIGHT
    assert error(got["dg"] + got["dd"] * absorbed["d"], ref["dg"]) < TIGHT


@pytest.mark.parametrize("kind", ["mild", "spikes of -1e4"])
def test_absorbed_rows_need_the_exclusive_sum_only(kind):
    # F and L of one chunk against the transition products of the recurrence itself, alpha = 0 included.
    randn, unit = draws(14)
    a, d, k, g, S = unit(C, K), unit(C, K), unit(C, K), hard_gates(kind, C, K), randn(V, K)
    v = randn(C, V)
    n = torch.eye(C, dtype=g.dtype)
    L = tree_gram(d, k, g, diagonal=False, exclusive=True)
    F = n + tree_gram(d, a, g, diagonal=False, exclusive=True)
    before = (g.new_ones(C, C).tril(-1) @ g).exp()
    V2 = -torch.linalg.solve_triangular(F, L @ v + (d * before) @ S.mT, upper=False)
    rows = []
    for t in range(C):
        rows.append(-S @ d[t])
        S = S * g[t].exp() + torch.outer(rows[-1], a[t]) + torch.outer(v[t], k[t])
    assert error(V2, torch.stack(rows)) < TIGHT


# The folds


def test_fold_same_write_direction_merges_the_gram_products():
    c = chunk_with(a=one_chunk().k)
    assert torch.equal(c.QL @ c.AR.mT, c.QL @ c.KR.mT)
    assert error(torch.linalg.inv(c.E), torch.eye(C, dtype=c.L.dtype) + c.L) < TIGHT  # F = I + L


def test_fold_same_write_direction_makes_u_one_product():
    c = chunk_with(a=one_chunk().k)
    Cc = -c.E @ c.L @ c.v
    assert error(c.v + Cc, c.E @ c.v) < TIGHT


def test_fold_same_write_direction_merges_the_outputs():
    c = chunk_with(a=one_chunk().k)
    new = c.E @ c.v - c.W @ c.S.mT
    assert error(new, c.v + c.V2) < TIGHT
    assert error(c.QL @ c.S.mT + (c.QL @ c.KR.mT).tril() @ new, c.O) < TIGHT
    assert error((c.S + new.mT @ c.KR) * c.G[-1], c.S_next) < TIGHT


def test_fold_same_write_direction_in_the_solve_form():
    c = chunk_with(a=one_chunk().k)
    F = torch.eye(C, dtype=c.L.dtype) + c.L
    assert error(torch.linalg.solve_triangular(F, c.v - c.BL @ c.S.mT, upper=False), c.v + c.V2) < TIGHT


def test_fold_row_scale_leaves_the_gram_product():
    k, beta = one_chunk().k, draws(15)[0](C, 1).sigmoid()
    c = chunk_with(a=k, b=beta * k)
    KL = c.k * c.G
    assert error(beta * (KL @ c.KR.mT), c.BL @ c.KR.mT) < TIGHT
    assert error(beta * (KL @ c.S.mT), c.BL @ c.S.mT) < TIGHT


def test_fold_one_decay_a_head_leaves_the_gram_product():
    randn, unit = draws(16)
    x, y, g = unit(C, K), unit(C, K), logsigmoid(randn(C, 1))
    plain = (x @ y.mT) * pair_exponents(g).squeeze(-1).exp()
    assert error(plain.tril(), tree_gram(x, y, g.expand(C, K), diagonal=True)) < TIGHT


def test_fold_no_decay_removes_every_exponent():
    c = chunk_with(g=torch.zeros(C, K, dtype=torch.float64))
    assert torch.equal(c.G, torch.ones_like(c.G))
    for decayed, plain in ((c.QL, c.q), (c.KR, c.k), (c.AR, c.a), (c.BL, c.b)):
        assert torch.equal(decayed, plain)


def test_fold_no_erase_leaves_gated_linear_attention():
    c = chunk_with(b=torch.zeros(C, K, dtype=torch.float64))
    assert torch.equal(c.E, torch.eye(C, dtype=torch.float64))
    assert not any(bool(zero.any()) for zero in (c.L, c.W, c.V2))
    assert error(c.QL @ c.S.mT + (c.QL @ c.KR.mT).tril() @ c.v, c.O) < TIGHT


def test_fold_decayed_direction_carries_the_exclusive_decay():
    streams, _, _ = problem(T=C)
    d, g = streams["b"], streams["g"]
    G = g.cumsum(0).exp()
    before = torch.cat([torch.ones(1, K, dtype=G.dtype), G[:-1]])
    assert error((d / g.exp()) * G, d * before) < TIGHT


def test_fold_token_wise_clip_commutes_with_chunking():
    streams, _, _ = problem()
    eta = draws(17)[0](T, 1).sigmoid() * 2
    j, k = streams["a"], streams["k"]
    whole = clip_gate(streams["g"], eta * k, j)
    rows = zip(*(x.split(C) for x in (streams["g"], eta * k, j)), strict=True)
    assert torch.equal(whole, torch.cat([clip_gate(*chunk) for chunk in rows]))
    clipped = streams | {"b": eta * k, "v": eta * streams["v"], "g": whole}
    o, ht = chunk_forward(**clipped, C=C, scale=SCALE)
    o_ref, ht_ref = token_loop(**clipped, scale=SCALE)
    assert max(error(o, o_ref), error(ht, ht_ref)) < TIGHT
    assert not torch.equal(whole, streams["g"])


def chunk_with(**changed: Tensor):
    """Return the chunk of ``one_chunk`` with some streams replaced."""
    streams, _, _ = problem(T=C)
    h0 = streams.pop("h0")
    return chunk_of(**(streams | changed), S=h0.mT, scale=SCALE)


# The clip


@pytest.mark.parametrize("size", [2, 3, 16])
def test_rho_is_the_spectral_norm(size):
    randn, _ = draws(18)
    for length in (0.3, 1.0, 3.0):
        x, y = length * randn(50, size), randn(50, size)
        norm = torch.linalg.matrix_norm(torch.eye(size, dtype=x.dtype) - x[:, :, None] * y[:, None, :], ord=2)
        assert error(log_rho(x, y).exp(), norm) < TIGHT
        assert bool((log_rho(x, y) >= 0).all())


def test_rho_bounds_the_norm_of_a_single_channel():
    x = torch.linspace(-3, 3, 61, dtype=torch.float64)[:, None]
    rho, norm = log_rho(x, torch.ones_like(x)).exp(), (1 - x).abs().squeeze(1)
    assert bool((rho >= norm - 1e-12).all())
    assert bool((rho > norm + 0.1).any())  # a bound there, not the norm


def test_clipped_transition_does_not_expand():
    randn, unit = draws(19)
    x, y = 2 * unit(200, 8), unit(200, 8)
    g = clip_gate(-randn(200, 8).abs() * 0.1, x, y)
    step = g.exp()[:, :, None] * (torch.eye(8, dtype=g.dtype) - x[:, :, None] * y[:, None, :])
    assert torch.linalg.matrix_norm(step, ord=2).max() <= 1 + 1e-12


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_safe_form_never_clips_the_delta_rule(dtype):
    unit = draws(20)[1]
    k = unit(5000, 16).to(dtype)
    eta = 2 * torch.rand(5000, 1, generator=torch.Generator().manual_seed(0), dtype=dtype)
    eta[:100] = 2
    zero = torch.zeros(5000, 16, dtype=dtype)
    assert torch.equal(clip_gate(zero, eta * k, k), zero)
    # The plain form is an ulp over 1 for many of these tokens, and a clip there takes the gate's gradient.
    x, y = eta * k, k
    n, dot = x.norm(dim=-1) * y.norm(dim=-1), (x * y).sum(-1)
    plain = (n + ((n - 2) ** 2 + 4 * (n - dot)).clamp(min=0).sqrt()) / 2
    assert (plain > 1).double().mean() > 0.02


def test_clip_gradient_is_the_derivative_of_the_formula():
    randn, _ = draws(21)
    g, x, y = (z.requires_grad_() for z in (-0.01 * randn(6, 4).abs(), 1.5 * randn(6, 4), randn(6, 4)))
    assert torch.autograd.gradcheck(clip_gate, (g, x, y))


def test_clip_gradient_is_finite_at_its_corners():
    unit = draws(22)[1]
    y = unit(4, 5)
    x = torch.stack([2 * y[0], 0 * y[1], y[2], 2 * y[3]])  # n = 2 and parallel; x zero; n = 1 and parallel; n = 2
    y[2] = 0
    leaves = [z.requires_grad_() for z in (torch.zeros(4, 5, dtype=x.dtype), x, y)]
    grads = torch.autograd.grad(log_rho(leaves[1], leaves[2]).sum() + clip_gate(*leaves).sum(), leaves)
    assert all(bool(torch.isfinite(grad).all()) for grad in grads)
    assert torch.equal(grads[0], torch.ones_like(grads[0]))  # nothing clipped: the gate keeps its gradient
