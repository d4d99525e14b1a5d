"""From a binding to a kernel that trains: emit KDA, compile it whole, hold it against a token loop.

The command line writes one file into an empty folder. That file is loaded as any project that had copied it would
load it, run forward and backward under ``torch.compile(fullgraph=True)``, and compared with the recurrence in float64.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

BATCH, TOKENS, HEADS, VALUE_HEADS, KEY, VALUE = 2, 200, 2, 4, 64, 64  # 200 tokens: the last chunk is not full
BLOCK = 16  # rows looked at together, so that one wrong row shows
NAMES = ("q", "k", "v", "g", "beta", "initial_state")

# rms(x - ref) / rms(ref) allowed: outputs, gradients of the streams, gradients of the gates.
BOUNDS = {torch.float32: (1e-4, 1e-4, 1e-3), torch.bfloat16: (5e-3, 8e-3, 2e-2)}

Op = Callable[..., tuple[Tensor, Tensor]]


class Row(NamedTuple):
    name: str
    error: float
    worst_head: float
    worst_block: float  # against the rms of its head
    bound: float

    @property
    def passes(self) -> bool:
        # `<=` is false for NaN, so a result that is not finite fails.
        return self.error <= self.bound and self.worst_head <= 2 * self.bound and self.worst_block <= 10 * self.bound


def emit(folder: Path) -> Path:
    """Write kda.py into `folder` through the command line, in a process of its own."""
    cli = "from dplrgen.cli import main; raise SystemExit(main())"
    subprocess.run([sys.executable, "-c", cli, "emit", "--variant", "kda", "--out", str(folder)], check=True)
    return folder / "kda.py"


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("emitted_kda", path)
    if spec is None or spec.loader is None:
        raise ImportError(f"cannot load {path}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def token_loop(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, *, initial_state: Tensor, output_final_state: bool = True
) -> tuple[Tensor, Tensor]:
    """The recurrence of KDA, a token at a time; the state is [B, HV, K, V], as in the op."""
    group = v.shape[2] // q.shape[2]
    q, k = (x.repeat_interleave(group, dim=2) for x in (q, k))
    scale = q.shape[-1] ** -0.5
    state, outputs = initial_state, []
    for t in range(q.shape[1]):
        key = k[:, t, :, :, None]
        state = state * g[:, t, :, :, None].exp()
        erased = (key * state).sum(-2)
        write = beta[:, t, :, None] * (v[:, t] - erased)
        state = state + key * write[:, :, None, :]
        outputs.append(scale * (q[:, t, :, :, None] * state).sum(-2))
    return torch.stack(outputs, dim=1), state


def make_inputs(dtype: torch.dtype, device: str) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    streams = {
        "q": F.normalize(randn(BATCH, TOKENS, HEADS, KEY), dim=-1).to(dtype),
        "k": F.normalize(randn(BATCH, TOKENS, HEADS, KEY), dim=-1).to(dtype),
        "v": randn(BATCH, TOKENS, VALUE_HEADS, VALUE).to(dtype),
        "g": F.logsigmoid(randn(BATCH, TOKENS, VALUE_HEADS, KEY)),
        "beta": torch.rand((BATCH, TOKENS, VALUE_HEADS), generator=generator),
        "initial_state": randn(BATCH, VALUE_HEADS, KEY, VALUE),
    }
    return {name: x.to(device) for name, x in streams.items()}


def outputs_and_gradients(op: Op, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """What the op returns, and the gradient of every input for one fixed draw of the outputs' gradients."""
    leaves = {name: x.detach().clone().requires_grad_() for name, x in inputs.items()}
    *streams, initial_state = (leaves[name] for name in NAMES)
    o, final_state = op(*streams, initial_state=initial_state, output_final_state=True)
    generator = torch.Generator().manual_seed(1)
    # Rounded to bfloat16, so that every dtype takes the same numbers.
    upstream = [torch.randn(x.shape, generator=generator).bfloat16().to(x) for x in (o, final_state)]
    torch.autograd.backward((o, final_state), upstream)
    gradients = {f"d {name}": x.grad for name, x in leaves.items() if x.grad is not None}
    return {"o": o.detach(), "final state": final_state.detach(), **gradients}


def rms(x: Tensor) -> float:
    return x.square().mean().sqrt().item()


def by_head(name: str, x: Tensor) -> Iterator[Tensor]:
    """[rows, columns] for every batch and head; a state's rows are its key channels."""
    heads_first = x if "state" in name else x.transpose(1, 2)
    return iter(heads_first.reshape(x.shape[0] * heads_first.shape[1], heads_first.shape[2], -1))


def bound_of(name: str, dtype: torch.dtype) -> float:
    outputs, streams, gates = BOUNDS[dtype]
    if name in ("d g", "d beta"):
        return gates
    return streams if name.startswith("d ") else outputs


def compare(name: str, found: Tensor, reference: Tensor, dtype: torch.dtype) -> Row:
    difference = found.double() - reference
    heads = [(d, rms(r)) for d, r in zip(by_head(name, difference), by_head(name, reference), strict=True)]
    return Row(
        name=name,
        error=rms(difference) / rms(reference),
        worst_head=max(rms(d) / size for d, size in heads),
        worst_block=max(rms(block) / size for d, size in heads for block in d.split(BLOCK)),
        bound=bound_of(name, dtype),
    )


def check(op: Op, dtype: torch.dtype, device: str) -> bool:
    """Print one line a tensor; true where all are within their bounds."""
    inputs = make_inputs(dtype, device)
    compiled = torch.compile(op, fullgraph=True)
    started = time.perf_counter()
    found = outputs_and_gradients(compiled, inputs)
    seconds = time.perf_counter() - started
    # The loop sees the rounded inputs: what is measured is the op's error, not that of its input's dtype.
    reference = outputs_and_gradients(token_loop, {name: x.double() for name, x in inputs.items()})
    missing = reference.keys() - found.keys()
    rows = [compare(name, found[name], reference[name], dtype) for name in reference if name not in missing]

    print(f"\n{str(dtype).removeprefix('torch.')} streams on {device}, compiled and run in {seconds:.1f} s")
    print(f"{'':16}{'error':>10}{'worst head':>12}{'worst block':>13}{'bound':>9}")
    for row in rows:
        verdict = "ok" if row.passes else "BEYOND THE BOUND"
        print(
            f"{row.name:16}{row.error:10.1e}{row.worst_head:12.1e}{row.worst_block:13.1e}{row.bound:9.0e}  {verdict}",
        )
    for name in sorted(missing):
        print(f"{name:16} NO GRADIENT")
    return not missing and all(row.passes for row in rows)


def main() -> int:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtypes = [torch.float32, torch.bfloat16]
    with tempfile.TemporaryDirectory() as folder:
        path = emit(Path(folder))
        print(f"emitted {path.name}: {len(path.read_text(encoding='utf-8').splitlines())} lines, torch and triton only")
        op = load(path).kda
        verdicts = [check(op, dtype, device) for dtype in dtypes]
    print("\nwithin all bounds" if all(verdicts) else "\nBEYOND A BOUND")
    return 0 if all(verdicts) else 1


if __name__ == "__main__":
    sys.exit(main())
