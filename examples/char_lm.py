"""A small language model whose only token mixing is KDA: it learns English, and it recalls across 256 tokens.

Two blocks of RMSNorm, KDA mixer, RMSNorm and SwiGLU, the mixer as in the Kimi Linear paper: short convolutions on
q, k and v, a decay for every channel, an output norm with a sigmoid gate. Compiled whole with ``fullgraph=True``.

    python examples/char_lm.py                  both tasks, losses by step, char_lm.png
    python examples/char_lm.py --task lm        characters of the help pages that ship with Python
    python examples/char_lm.py --task recall    values of keys seen more than 256 tokens before

Every claim is an assertion at the end of its task: the language model beats a bigram count model on held-out text
and needs the op to do so, compiled and eager losses agree, recall is nearly perfect.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from pydoc_data.topics import topics

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dplrgen

IGNORED = -100  # the target of a position that carries no loss
AGREEMENT_STEPS = 20

Batch = tuple[Tensor, Tensor]
Batches = Callable[[int], Batch]
Curve = list[tuple[int, float]]


# The model


@dataclass(frozen=True)
class Config:
    vocabulary: int
    width: int = 128
    layers: int = 2
    heads: int = 2
    head_size: int = 64
    hidden: int = 256
    step_range: tuple[float, float] = (1e-3, 1e-1)  # of softplus(dt_bias) at the start: how fast channels forget
    op_dtype: torch.dtype = torch.float32  # of the streams that the op is given; everything else is float32


class ShortConvolution(nn.Module):
    """Causal, depthwise, four taps; written as shifted products, which the compiler fuses into their neighbours."""

    TAPS = 4

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(self.TAPS, width).uniform_(-(self.TAPS**-0.5), self.TAPS**-0.5))

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.shape[1]
        padded = F.pad(x, (0, 0, self.TAPS - 1, 0))
        return torch.stack([w * padded[:, i : i + tokens] for i, w in enumerate(self.weight.unbind())]).sum(0)


class KimiDeltaMixer(nn.Module):
    op_gain: Tensor

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.heads, self.head_size, self.op_dtype = config.heads, config.head_size, config.op_dtype
        inner = config.heads * config.head_size
        self.qkv = nn.Linear(config.width, 3 * inner, bias=False)
        self.convolution = ShortConvolution(3 * inner)
        self.decay = low_rank(config.width, config.head_size, inner)
        self.beta = nn.Linear(config.width, config.heads, bias=False)
        self.gate = low_rank(config.width, config.head_size, inner)
        self.A_log = nn.Parameter(torch.empty(config.heads).uniform_(1, 16).log())
        self.dt_bias = nn.Parameter(inverse_softplus(log_uniform(inner, *config.step_range)))
        self.norm = nn.RMSNorm(config.head_size)
        self.out = nn.Linear(inner, config.width, bias=False)
        # 1 always, but for the measurement of what the op is worth. A buffer, so that no other graph is compiled.
        self.register_buffer("op_gain", torch.ones(()), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        by_head = (self.heads, self.head_size)
        q, k, v = F.silu(self.convolution(self.qkv(x))).unflatten(-1, (3, *by_head)).unbind(-3)
        step = F.softplus(self.decay(x) + self.dt_bias).unflatten(-1, by_head)
        g = -self.A_log.exp()[:, None] * step
        beta = torch.sigmoid(self.beta(x))
        q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
        q, k, v = (stream.to(self.op_dtype) for stream in (q, k, v))
        o, _ = dplrgen.ops.kda(q, k, v, g, beta)
        o = self.norm(self.op_gain * o.to(x.dtype)) * torch.sigmoid(self.gate(x)).unflatten(-1, by_head)
        return self.out(o.flatten(-2))


class SwiGLU(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.into = nn.Linear(config.width, 2 * config.hidden, bias=False)
        self.out = nn.Linear(config.hidden, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.into(x).chunk(2, dim=-1)
        return self.out(F.silu(gate) * value)


class Block(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.mixer_norm, self.mixer = nn.RMSNorm(config.width), KimiDeltaMixer(config)
        self.mlp_norm, self.mlp = nn.RMSNorm(config.width), SwiGLU(config)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mixer(self.mixer_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class Model(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.embedding = nn.Embedding(config.vocabulary, config.width)
        self.blocks = nn.Sequential(*(Block(config) for _ in range(config.layers)))
        self.norm = nn.RMSNorm(config.width)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        nn.init.normal_(self.embedding.weight, std=0.5)
        nn.init.normal_(self.head.weight, std=0.5 * config.width**-0.5)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.embedding(tokens))))


def low_rank(width: int, rank: int, out: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, rank, bias=False), nn.Linear(rank, out, bias=False))


def log_uniform(size: int, low: float, high: float) -> Tensor:
    ends = torch.tensor([low, high]).log().tolist()
    return torch.empty(size).uniform_(*ends).exp()


def inverse_softplus(x: Tensor) -> Tensor:
    return x + torch.log(-torch.expm1(-x))


def loss_of(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten(), ignore_index=IGNORED)


# Training


@dataclass(frozen=True)
class Schedule:
    steps: int
    peak: float
    warmup: int

    def rate(self, step: int) -> float:
        """Linear up, then linear down to zero."""
        rising = (step + 1) / self.warmup
        falling = (self.steps - step) / max(1, self.steps - self.warmup)
        return self.peak * min(1.0, rising, falling)


def seeded(seed: int, step: int) -> torch.Generator:
    """The draw of one step: the same in every run, whatever was drawn before."""
    return torch.Generator().manual_seed((seed + 2) * 1_000_003 + step)


def new_model(config: Config, device: str, seed: int) -> Model:
    # Drawn on the CPU, so that a seed means the same weights on every device.
    torch.manual_seed(seed)
    return Model(config).to(device)


def train(
    model: Model,
    batches: Batches,
    schedule: Schedule,
    *,
    steps: int,
    compiled: bool,
    report: Callable[[int, float], None] = lambda step, loss: None,
) -> Curve:
    """Run the first `steps` of the schedule, in place; the loss of every step."""
    step_loss = torch.compile(loss_of, fullgraph=True, dynamic=False) if compiled else loss_of
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.98), weight_decay=0.01, fused=True)
    losses: Curve = []
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = schedule.rate(step)
        loss = step_loss(model, *batches(step))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append((step, loss.item()))
        report(*losses[-1])
    return losses


def agreement(config: Config, batches: Batches, schedule: Schedule, device: str, seed: int) -> float:
    """The largest difference of a compiled and an eager run, loss by loss, over the first steps."""
    runs = [
        train(new_model(config, device, seed), batches, schedule, steps=AGREEMENT_STEPS, compiled=compiled)
        for compiled in (True, False)
    ]
    return max(abs(one - other) for (_, one), (_, other) in zip(*runs, strict=True))


@torch.no_grad()
def mean_loss(model: Model, batches: Sequence[Batch]) -> float:
    return sum(loss_of(model, *batch).item() for batch in batches) / len(batches)


def set_op_gain(model: Model, gain: float) -> None:
    for module in model.modules():
        if isinstance(module, KimiDeltaMixer):
            module.op_gain.fill_(gain)


# Task 1: characters of English text

LM_TOKENS, LM_BATCH = 256, 8
LM_SCHEDULE = Schedule(steps=80, peak=4e-3, warmup=20)
VALIDATION_SHARE = 0.1


def help_text() -> str:
    """Python's help pages in order of their names. They quote each other: each paragraph is kept once, so that none
    of the validation text was seen in training."""
    paragraphs = (p for name in sorted(topics) for p in topics[name].split("\n\n"))
    return "\n\n".join(dict.fromkeys(paragraphs))


def encode(text: str) -> tuple[Tensor, int]:
    """The text as character numbers, and how many characters there are."""
    number = {character: i for i, character in enumerate(sorted(set(text)))}
    return torch.tensor([number[character] for character in text]), len(number)


def split(data: Tensor) -> tuple[Tensor, Tensor]:
    held_out = int(VALIDATION_SHARE * len(data))
    return data[:-held_out], data[-held_out:]


def random_windows(data: Tensor, device: str, seed: int) -> Batches:
    offsets = torch.arange(LM_TOKENS + 1)

    def batch(step: int) -> Batch:
        starts = torch.randint(len(data) - LM_TOKENS, (LM_BATCH, 1), generator=seeded(seed, step))
        windows = data[starts + offsets].to(device)
        return windows[:, :-1], windows[:, 1:]

    return batch


def all_windows(data: Tensor, device: str) -> list[Batch]:
    """Every token of `data` once, up to the last full batch; the model starts each window knowing nothing."""
    size = LM_TOKENS * LM_BATCH
    count = (len(data) - 1) // size
    inputs, targets = (data[i : i + count * size].view(count, LM_BATCH, LM_TOKENS).to(device) for i in (0, 1))
    return list(zip(inputs, targets, strict=True))


def bigram_loss(train_data: Tensor, validation: Sequence[Batch], characters: int) -> float:
    """Mean loss of add-k smoothed bigram counts, at the k that suits the validation text best."""
    counts = torch.zeros(characters, characters, dtype=torch.float64)
    counts.index_put_((train_data[:-1], train_data[1:]), torch.ones((), dtype=torch.float64), accumulate=True)
    inputs, targets = (torch.cat([batch[i].flatten() for batch in validation]).cpu() for i in (0, 1))

    def loss(k: float) -> float:
        smoothed = counts + k
        return -(smoothed / smoothed.sum(1, keepdim=True)).log()[inputs, targets].mean().item()

    return min(loss(k) for k in (0.01, 0.03, 0.1, 0.3, 1.0))


def run_lm(args: argparse.Namespace) -> tuple[dict[str, bool], dict[str, Curve]]:
    data, characters = encode(help_text())
    train_data, validation_data = split(data)
    schedule = with_steps(LM_SCHEDULE, args.steps)
    batches = random_windows(train_data, args.device, args.seed)
    validation = all_windows(validation_data, args.device)
    config = Config(vocabulary=characters, op_dtype=DTYPES[args.dtype])
    model = new_model(config, args.device, args.seed)
    print(f"\n## lm: {len(train_data):,} characters to train on, {len(validation_data):,} held out, {describe(model)}")

    bigram = bigram_loss(train_data, validation, characters)
    held_out: Curve = []

    def report(step: int, loss: float) -> None:
        if is_mark(step, schedule.steps):
            held_out.append((step, mean_loss(model, validation)))
            print_step(step, loss, f"held out {held_out[-1][1]:.4f}")

    losses = train(model, batches, schedule, steps=schedule.steps, compiled=True, report=report)
    final = mean_loss(model, validation)
    set_op_gain(model, 0.0)
    without_op = mean_loss(model, validation)
    difference = agreement(replace(config, op_dtype=torch.float32), batches, schedule, args.device, args.seed)

    claims = {
        f"held-out loss {final:.4f} is below the bigram model's {bigram:.4f}": final < bigram,
        f"with the op's output set to zero it is {without_op:.4f}, at least 0.1 worse": without_op >= final + 0.1,
        f"compiled and eager losses differ by {difference:.1e}, at most 1e-4": difference <= 1e-4,
    }
    return claims, {"train": losses, "held out": held_out, "bigram counts": level(bigram, schedule.steps)}


# Task 2: recall

PAIRS, KEYS, VALUES, FILLERS, GAP = 8, 16, 16, 8, 256
QUERIES = 2 * PAIRS  # every key is asked for twice
# Binding a value to its key is learned without a gap, on short sequences, and then carried over to the real task.
NEAR_BATCH, FAR_BATCH = 32, 16
NEAR_SCHEDULE = Schedule(steps=120, peak=8e-3, warmup=20)
FAR_SCHEDULE = Schedule(steps=30, peak=2e-3, warmup=5)
TEST_SEED = -1


def recall_batch(size: int, gap: int, generator: torch.Generator) -> Batch:
    """Pairs, noise, the keys again in another order: every pair stands more than `gap` tokens before its queries."""

    def pick(high: int, *shape: int) -> Tensor:
        return torch.randint(high, (size, *shape), generator=generator)

    def noise(*shape: int) -> Tensor:
        return KEYS + VALUES + pick(FILLERS, *shape)

    def shuffled(high: int) -> Tensor:
        return torch.rand(size, high, generator=generator).argsort(1)

    keys, values = shuffled(KEYS)[:, :PAIRS], KEYS + pick(VALUES, PAIRS)
    order = torch.cat([shuffled(PAIRS) for _ in range(QUERIES // PAIRS)], dim=1)
    # A query is followed by noise, not by its answer: no value is ever seen again.
    queries = torch.stack((keys.gather(1, order), noise(QUERIES)), dim=2).flatten(1)
    tokens = torch.cat((torch.stack((keys, values), dim=2).flatten(1), noise(gap), queries), dim=1)
    targets = torch.full_like(tokens, IGNORED)
    targets[:, -2 * QUERIES :: 2] = values.gather(1, order)
    return tokens, targets


def recall_batches(size: int, gap: int, device: str, seed: int) -> Batches:
    def batch(step: int) -> Batch:
        tokens, targets = recall_batch(size, gap, seeded(seed, step))
        return tokens.to(device), targets.to(device)

    return batch


@torch.no_grad()
def accuracy(model: Model, batches: Sequence[Batch]) -> float:
    hits = [
        (model(tokens).argmax(-1) == targets)[targets != IGNORED].float().mean().item() for tokens, targets in batches
    ]
    return sum(hits) / len(hits)


def run_recall(args: argparse.Namespace) -> tuple[dict[str, bool], dict[str, Curve]]:
    config = Config(
        vocabulary=KEYS + VALUES + FILLERS,
        heads=1,
        hidden=128,
        step_range=(1e-5, 1e-2),
        op_dtype=DTYPES[args.dtype],
    )
    model = new_model(config, args.device, args.seed)
    test_batch = recall_batches(FAR_BATCH, GAP, args.device, TEST_SEED)
    test = [test_batch(i) for i in range(8)]
    print(f"\n## recall: {PAIRS} pairs, queries more than {GAP} tokens after them, {describe(model)}")

    curve: Curve = []
    near, far = with_steps(NEAR_SCHEDULE, args.steps), FAR_SCHEDULE
    for size, gap, schedule in ((NEAR_BATCH, 0, near), (FAR_BATCH, GAP, far)):
        print(f"{gap} tokens between pairs and queries")

        def report(step: int, loss: float, last: int = schedule.steps) -> None:
            if is_mark(step, last):
                print_step(step, loss, f"recalled across {GAP}: {accuracy(model, test[:2]):.1%}")

        batches = recall_batches(size, gap, args.device, args.seed)
        losses = train(model, batches, schedule, steps=schedule.steps, compiled=True, report=report)
        curve += [(len(curve) + step, loss) for step, loss in losses]

    recalled = accuracy(model, test)
    set_op_gain(model, 0.0)
    without_op = accuracy(model, test)
    claims = {
        f"{recalled:.2%} of the values are recalled, over 95 %": recalled > 0.95,
        f"with the op's output set to zero {without_op:.2%}, about what chance gives": without_op < 2 / VALUES,
    }
    return claims, {"train": curve, "chance": level(math.log(VALUES), near.steps + far.steps)}


# The command line

Task = Callable[[argparse.Namespace], tuple[dict[str, bool], dict[str, Curve]]]

TASKS: dict[str, Task] = {"lm": run_lm, "recall": run_recall}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
MARKS = 5  # lines printed of a run


def with_steps(schedule: Schedule, steps: int | None) -> Schedule:
    return schedule if steps is None else replace(schedule, steps=steps, warmup=min(schedule.warmup, steps))


def describe(model: Model) -> str:
    parameters = sum(p.numel() for p in model.parameters())
    return f"{parameters:,} parameters"


def is_mark(step: int, steps: int) -> bool:
    return (step + 1) % max(1, steps // MARKS) == 0


def print_step(step: int, loss: float, remark: str) -> None:
    print(f"step {step + 1:5}   loss {loss:.4f}   {remark}", flush=True)


def level(value: float, steps: int) -> Curve:
    return [(0, value), (steps - 1, value)]


def draw(curves: dict[str, dict[str, Curve]], path: Path) -> None:
    """One panel a task. Matplotlib is imported here: the runs themselves do without it, as on a bare GPU machine."""
    try:
        import matplotlib
    except ImportError:
        print("\nmatplotlib is not installed: no picture")
        return

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, panels = plt.subplots(1, len(curves), figsize=(6 * len(curves), 4), squeeze=False, layout="constrained")
    for panel, (task, lines) in zip(panels[0], curves.items(), strict=True):
        for name, points in lines.items():
            style = {"train": "-", "held out": "o-"}.get(name, "--")
            panel.plot(*zip(*points, strict=True), style, label=name, linewidth=1, markersize=4)
        panel.set(title=task, xlabel="step", ylabel="loss, nats", ylim=(0, None))
        panel.legend()
        panel.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
    print(f"\nloss curves: {path}")


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--task", choices=[*TASKS, "all"], default="all")
    parser.add_argument("--steps", type=int, help="training steps of each task (default: enough for its claims)")
    parser.add_argument("--device", default=device, help=f"default here: {device}")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="of the op's streams")
    parser.add_argument("--out", type=Path, default=Path("char_lm.png"), help="where the loss curves go")
    parser.add_argument("--seed", type=int, default=0)
    # So small a model gains little from a second thread, and loses a lot where another program wants the core too.
    parser.add_argument("--threads", type=int, default=1, help="on the CPU")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    torch.set_num_threads(args.threads)
    names = list(TASKS) if args.task == "all" else [args.task]
    curves: dict[str, dict[str, Curve]] = {}
    claims: dict[str, bool] = {}
    for name in names:
        started = time.perf_counter()
        held, curves[name] = TASKS[name](args)
        print(f"{time.perf_counter() - started:.0f} s on {args.device}, compilation included")
        for claim, holds in held.items():
            print(f"  {'ok' if holds else 'NOT SO'}: {claim}")
        claims |= held
    draw(curves, args.out)
    return 0 if all(claims.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
