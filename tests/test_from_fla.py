"""docs/from-fla.md as a test: its Python blocks, run as they stand, against token loops in fla's own convention.

A block is found by its heading. Each loop is written from the equation that fla documents for the op, on the state
``h`` that fla keeps, ``[B, HV, K, V]``, with fla's argument names, signs and default scale.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import dplrgen.ops

PAGE = Path(__file__).parents[1] / "docs" / "from-fla.md"
B, T, H, K, V = 2, 70, 2, 16, 24  # T crosses a chunk of 64; K and V differ


def blocks(text: str) -> dict[str, str]:
    """Return the Python block under each third-level heading that has one."""
    sections = (section.partition("\n") for section in re.split(r"^### ", text, flags=re.MULTILINE)[1:])
    found = (
        (heading, re.search(r"^```python\n(.*?)^```", body, re.MULTILINE | re.DOTALL)) for heading, _, body in sections
    )
    return {heading: code[1] for heading, code in found if code}


EXAMPLES = blocks(PAGE.read_text(encoding="utf-8"))


# fla's recurrences, one token on h [B, HV, K, V]


def read(h: Tensor, x: Tensor) -> Tensor:
    """Return ``h^T x``."""
    return torch.einsum("bhkv,bhk->bhv", h, x)


def outer(x: Tensor, u: Tensor) -> Tensor:
    return x[..., :, None] * u[..., None, :]


def gated_delta_rule(h, k, v, g, beta):
    h = g.exp()[..., None, None] * h
    return h + outer(k, beta[..., None] * (v - read(h, k)))


def kda(h, k, v, g, beta):
    h = g.exp()[..., None] * h
    return h + outer(k, beta[..., None] * (v - read(h, k)))


def gdn2(h, k, v, g, b, w):
    h = g.exp()[..., None] * h
    return h + outer(k, w * v - read(h, b * k))


def dplr_delta_rule(h, k, v, a, b, gk):
    return gk.exp()[..., None] * h + outer(b, read(h, a)) + outer(k, v)


def rwkv7(h, w, k, v, a, b):
    return dplr_delta_rule(h, k, v, a, b, w)


def iplr_delta_rule(h, k, v, a, b):
    return h + outer(b, read(h, a)) + outer(k, v)


def comba(h, k, v, p, g, beta):
    h = g.exp()[..., None, None] * h
    return h + outer(k, beta[..., None] * (v - read(h, p)))


def delta_rule(h, k, v, beta):
    return h + outer(k, beta[..., None] * (v - read(h, k)))


def gla(h, k, v, g):
    return g.exp()[..., None] * h + outer(k, v)


def simple_gla(h, k, v, g):
    return g.exp()[..., None, None] * h + outer(k, v)


# What fla does to its inputs under a flag, before the recurrence


def l2norm(x: Tensor) -> Tensor:
    return x / (x.pow(2).sum(-1, keepdim=True) + 1e-6).sqrt()


def normalised(q, k, v, g, beta):
    return l2norm(q), l2norm(k), v, g, beta


def sigmoid_beta(q, k, v, g, beta):
    return q, k, v, g, 1 / (1 + torch.exp(-beta))


def negative_eigenvalues(q, k, v, g, beta):
    return q, k, v, g, 2 / (1 + torch.exp(-beta))


def head_gate(q, k, v, g, beta, A_log, dt_bias):
    return q, k, v, -torch.exp(A_log) * torch.log1p(torch.exp(g + dt_bias)), beta


def channel_gate(q, k, v, g, beta, A_log, dt_bias):
    bias = dt_bias.reshape(A_log.numel(), K)
    return q, k, v, -torch.exp(A_log)[:, None] * torch.log1p(torch.exp(g + bias)), beta


def bounded_gate(q, k, v, g, beta, A_log, dt_bias, lower_bound):
    bias = dt_bias.reshape(A_log.numel(), K)
    return q, k, v, lower_bound / (1 + torch.exp(-torch.exp(A_log)[:, None] * (g + bias))), beta


def one_decay(q, k, v, g_gamma):
    return q, k, v, g_gamma[None, None].repeat(B, T, 1)


def retention(q, k, v):
    decays = torch.tensor([1 - 2.0 ** (-5 - head) for head in range(H)], dtype=torch.float64)
    return q, k, v, decays.log()[None, None].repeat(B, T, 1)


def lightning(q, k, v, layer_idx, num_layers):
    slopes = torch.tensor([8 * head / H * (1 - layer_idx / num_layers) for head in range(H)], dtype=torch.float64)
    return q, k, v, -slopes[None, None].repeat(B, T, 1)


def undecayed(q, k, v):
    return q, k, v, torch.zeros(B, T, H, dtype=torch.float64)


def heads_second(*streams):
    return tuple(x.movedim(1, 2) for x in streams)


# The inputs, by what a stream is


def unit(*shape: int) -> Tensor:
    return F.normalize(torch.randn(*shape, dtype=torch.float64), dim=-1)


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def rate(*shape: int) -> Tensor:
    return torch.rand(*shape, dtype=torch.float64)


def log_decay(*shape: int) -> Tensor:
    return F.logsigmoid(normal(*shape))


def erase(*shape: int) -> Tensor:
    """A direction short enough that the recurrence does not expand over T tokens."""
    return 0.3 * unit(*shape)


Law = Callable[..., Tensor]
KEY, VALUE, HEAD = "B T H K", "B T HV V", "B T HV"
CHANNEL = "B T HV K"


@dataclass(frozen=True)
class Row:
    """One block of the page: fla's streams in fla's order, the step they go through, and fla's default scale."""

    step: Callable[..., Tensor]
    streams: dict[str, tuple[Law, str]]
    HV: int = H
    scale: float = K**-0.5
    before: Callable[..., tuple[Tensor, ...]] | None = None
    value_first: bool = False
    constants: tuple[tuple[str, float], ...] = ()


QKV = {"q": (unit, KEY), "k": (unit, KEY), "v": (normal, VALUE)}
GDN = QKV | {"g": (log_decay, HEAD), "beta": (rate, HEAD)}
KDA = QKV | {"g": (log_decay, CHANNEL), "beta": (rate, HEAD)}
DPLR = QKV | {"a": (erase, KEY), "b": (unit, KEY), "gk": (log_decay, KEY)}
GATED = KDA | {"g": (normal, CHANNEL), "A_log": (normal, "HV"), "dt_bias": (normal, "HV*K")}
HEADS_FIRST = {name: (law, shape.replace("T HV", "HV T").replace("T H ", "H T ")) for name, (law, shape) in KDA.items()}

ROWS: dict[str, Row] = {
    "chunk_gated_delta_rule": Row(gated_delta_rule, GDN, HV=2 * H),
    "chunk_kda": Row(kda, KDA, HV=2 * H),
    "chunk_gdn2": Row(gdn2, QKV | {"g": (log_decay, KEY), "b": (rate, KEY), "w": (rate, VALUE)}),
    "chunk_dplr_delta_rule": Row(dplr_delta_rule, DPLR),
    "chunk_rwkv7": Row(
        rwkv7,
        {"r": QKV["q"], "w": (log_decay, KEY), "k": QKV["k"], "v": QKV["v"], "a": DPLR["a"], "b": DPLR["b"]},
        scale=1.0,
    ),
    "chunk_iplr_delta_rule": Row(iplr_delta_rule, QKV | {"a": DPLR["a"], "b": DPLR["b"]}),
    "chunk_comba": Row(comba, QKV | {"p": (unit, KEY), "g": (log_decay, HEAD), "beta": (rate, HEAD)}),
    "chunk_delta_rule": Row(delta_rule, QKV | {"beta": (rate, HEAD)}),
    "chunk_gla": Row(gla, QKV | {"g": (log_decay, KEY)}),
    "chunk_simple_gla": Row(simple_gla, QKV | {"g": (log_decay, HEAD)}),
    "chunk_retention": Row(simple_gla, QKV, before=retention),
    "chunk_lightning_attn": Row(simple_gla, QKV, before=lightning, constants=(("layer_idx", 1.0), ("num_layers", 4.0))),
    "chunk_linear_attn": Row(simple_gla, QKV, before=undecayed),
    "use_qk_l2norm_in_kernel": Row(kda, KDA | {"q": (normal, KEY), "k": (normal, KEY)}, before=normalised),
    "use_beta_sigmoid_in_kernel": Row(kda, KDA | {"beta": (normal, HEAD)}, before=sigmoid_beta),
    "allow_neg_eigval": Row(kda, KDA | {"beta": (normal, HEAD)}, before=negative_eigenvalues),
    "use_gate_in_kernel, one decay a head": Row(
        gated_delta_rule,
        GDN | {"g": (normal, HEAD), "A_log": (normal, "HV"), "dt_bias": (normal, "HV")},
        HV=2 * H,
        before=head_gate,
    ),
    "use_gate_in_kernel, one decay a channel": Row(kda, GATED, HV=2 * H, before=channel_gate),
    "use_gate_in_kernel with lower_bound": Row(
        kda, GATED, HV=2 * H, before=bounded_gate, constants=(("lower_bound", -5.0),)
    ),
    "state_v_first": Row(kda, KDA, value_first=True),
    "g_gamma": Row(simple_gla, QKV | {"g_gamma": (log_decay, "HV")}, before=one_decay),
    "head_first": Row(kda, HEADS_FIRST, before=heads_second),
}
BACKWARDS = "dplr in fla's terms"


def draw(row: Row) -> dict[str, Tensor]:
    """Return the leaves of one row: its streams and the initial state ``h0``."""
    torch.manual_seed(0)
    sizes = {"B": B, "T": T, "H": H, "HV": row.HV, "K": K, "V": V, "HV*K": row.HV * K}
    state = "B HV V K" if row.value_first else "B HV K V"
    laws = row.streams | {"h0": (normal, state)}
    return {name: law(*(sizes[s] for s in shape.split())).requires_grad_() for name, (law, shape) in laws.items()}


def loop(row: Row, leaves: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return ``(o, final_state)`` as fla defines them, a token at a time."""
    inputs = [leaves[name] for name in row.streams] + [value for _, value in row.constants]
    q, *streams = row.before(*inputs) if row.before else inputs
    q, *streams = (x.repeat_interleave(row.HV // x.shape[2], dim=2) for x in (q, *streams))
    h, rows = leaves["h0"].mT if row.value_first else leaves["h0"], []
    for t in range(streams[0].shape[1]):
        h = row.step(h, *(x[:, t] for x in streams))
        rows.append(read(h, row.scale * q[:, t]))
    o = torch.stack(rows, dim=2 if row.before is heads_second else 1)
    return o, h.mT if row.value_first else h


def run_example(heading: str, leaves: dict[str, Tensor], **constants: float) -> dict[str, object]:
    """Run the block under ``heading`` with the leaves under fla's names, and return all that it defines."""
    scope: dict[str, object] = {"torch": torch, "F": F, "dplrgen": dplrgen, **leaves, **constants}
    exec(compile(EXAMPLES[heading], f"{PAGE.name}: {heading}", "exec"), scope)
    return scope


def assert_same(got: tuple[Tensor, Tensor], ref: tuple[Tensor, Tensor], leaves: dict[str, Tensor]) -> None:
    """Outputs, final state and the gradients of every leaf agree."""
    for x, x_ref in zip(got, ref, strict=True):
        torch.testing.assert_close(x, x_ref, rtol=1e-9, atol=1e-10)
    arriving = tuple(torch.randn_like(x) for x in ref)
    grads = torch.autograd.grad(got, tuple(leaves.values()), arriving)
    grads_ref = torch.autograd.grad(ref, tuple(leaves.values()), arriving)
    for name, grad, grad_ref in zip(leaves, grads, grads_ref, strict=True):
        torch.testing.assert_close(grad, grad_ref, rtol=1e-8, atol=1e-9, msg=lambda text, name=name: f"d{name}: {text}")


def test_every_block_of_the_page_is_run():
    assert set(EXAMPLES) == set(ROWS) | {BACKWARDS}
    assert PAGE.read_text(encoding="utf-8").count("```python") == len(EXAMPLES)


@pytest.mark.parametrize("heading", ROWS)
def test_call_is_fla(heading):
    row = ROWS[heading]
    leaves = draw(row)
    scope = run_example(heading, leaves, **dict(row.constants))
    assert_same((scope["o"], scope["final_state"]), loop(row, leaves), leaves)


def test_gated_form_in_the_terms_of_fla():
    row = Row(dplr_delta_rule, QKV | {"a": (unit, KEY), "b": (erase, KEY), "g": (log_decay, KEY)})
    leaves = draw(row)
    scope = run_example(BACKWARDS, leaves)
    in_fla = {name: leaves[name] for name in ("q", "k", "v", "h0")}
    in_fla |= {"a": scope["a_fla"], "b": scope["b_fla"], "gk": leaves["g"]}
    ref = loop(Row(dplr_delta_rule, DPLR), in_fla)
    assert_same((scope["o"], scope["final_state"]), ref, leaves)


def test_table_names_the_calls_of_the_blocks():
    # The table and the blocks are two statements of one fact: the positional streams must agree.
    cells = re.findall(r"^\| `(chunk_\w+)` \|.*\| `(\w+)\(([^)]*)\)`", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert {name for name, _, _ in cells} == {name for name in ROWS if name.startswith("chunk_")}
    for name, variant, streams in cells:
        call = re.search(r"dplrgen\.ops\.(\w+)\(\s*(.*?)\s*\)\s*$", EXAMPLES[name], re.DOTALL)
        assert call is not None
        assert call[1] == variant
        positional = [arg for arg in re.split(r",\s*", call[2]) if "=" not in arg]
        expected = [arg for arg in re.split(r",\s*", streams) if "=" not in arg]
        assert [arg.replace("torch.zeros_like(k)", "g") for arg in positional] == expected


LAST_TABLE = PAGE.read_text(encoding="utf-8").rpartition("###")[2]
ARGUMENTS = dict(re.findall(r"^\| (`[^|]*) \| ([^|]*) \|$", LAST_TABLE, re.MULTILINE))


def test_arguments_without_a_place_are_refused_by_name():
    leaves = draw(ROWS["chunk_kda"])
    streams = [leaves[name] for name in KDA]
    refused = [cell for cell, what in ARGUMENTS.items() if what.startswith(("leave out", "no counterpart"))]
    assert set(ARGUMENTS) - set(refused) == {"`cu_seqlens`", "`fused_recurrent_*` with `T = 1`"}
    for name in re.findall(r"`(\w+)`", " ".join(refused)):
        with pytest.raises(TypeError, match=name):
            dplrgen.ops.kda(*streams, **{name: None})


def test_packed_calls_are_those_of_fla():
    assert ARGUMENTS["`cu_seqlens`"] == "the same; states have a row a sequence"
    row = Row(kda, {name: (law, shape.replace("B ", "1 ", 1)) for name, (law, shape) in KDA.items()}, HV=2 * H)
    torch.manual_seed(0)
    sizes = {"1": 1, "T": T, "H": H, "HV": row.HV, "K": K, "V": V}
    streams = {name: law(*(sizes[s] for s in shape.split())) for name, (law, shape) in row.streams.items()}
    bounds, h0 = (0, 23, T), normal(2, row.HV, K, V)
    o, final_state = dplrgen.ops.kda(
        *streams.values(), initial_state=h0, output_final_state=True, cu_seqlens=torch.tensor(bounds)
    )
    for n, (start, end) in enumerate(itertools.pairwise(bounds)):
        part = {name: x[:, start:end] for name, x in streams.items()}
        o_ref, h_ref = loop(row, part | {"h0": h0[n : n + 1]})
        torch.testing.assert_close(o[:, start:end], o_ref, rtol=1e-9, atol=1e-10)
        torch.testing.assert_close(final_state[n : n + 1], h_ref, rtol=1e-9, atol=1e-10)


def test_a_recurrent_call_of_one_token_is_a_step():
    row = ROWS["chunk_kda"]
    leaves = {name: x.detach()[:, :1] if name != "h0" else x.detach() for name, x in draw(row).items()}
    state = leaves["h0"].clone()
    o, same = dplrgen.ops.kda_step(*(leaves[name][:, 0] for name in KDA), state, inplace=True)
    o_ref, h_ref = loop(row, leaves)
    assert same is state
    torch.testing.assert_close(o, o_ref[:, 0], rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(state, h_ref, rtol=1e-9, atol=1e-10)
