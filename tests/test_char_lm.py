"""The example that trains: its parts, without compilation. What it claims of a whole run it asserts itself."""

from __future__ import annotations

import importlib.util
import math
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def example() -> ModuleType:
    path = Path(__file__).parents[1] / "examples" / "char_lm.py"
    spec = importlib.util.spec_from_file_location("char_lm", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["char_lm"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_a_few_steps_lower_the_loss(example: ModuleType) -> None:
    data, characters = example.encode(example.help_text())
    train_data, held_out = example.split(data)
    assert len(train_data) > 100_000
    assert len(held_out) > 10_000
    config = example.Config(vocabulary=characters, width=32, heads=2, head_size=16, hidden=48)
    model = example.new_model(config, "cpu", 0)
    schedule = replace(example.LM_SCHEDULE, steps=12, warmup=3)
    losses = example.train(model, example.random_windows(train_data, "cpu", 0), schedule, steps=12, compiled=False)
    assert abs(losses[0][1] - math.log(characters)) < 1.0  # it starts knowing nothing
    assert losses[-1][1] < losses[0][1] - 0.5


def test_only_the_op_reaches_beyond_the_convolutions(example: ModuleType) -> None:
    config = example.Config(vocabulary=11, width=32, heads=2, head_size=16, hidden=48)
    model = example.new_model(config, "cpu", 1)
    tokens = torch.randint(11, (2, 70), generator=torch.Generator().manual_seed(2))
    changed = tokens.clone()
    changed[:, 20] = (changed[:, 20] + 1) % 11
    for gain, last in ((1.0, 69), (0.0, 20)):
        example.set_op_gain(model, gain)
        with torch.no_grad():
            differs = (model(tokens) != model(changed)).any(-1).any(0)
        assert not differs[:20].any()  # causal
        assert differs[20]
        assert differs.nonzero().max() == last  # with the op's output set to zero nothing is left that mixes tokens


def test_a_value_is_asked_for_beyond_the_gap_and_never_shown_again(example: ModuleType) -> None:
    tokens, targets = example.recall_batch(5, example.GAP, torch.Generator().manual_seed(3))
    pairs = tokens[:, : 2 * example.PAIRS]
    later, asked = tokens[:, 2 * example.PAIRS :], targets != example.IGNORED
    is_value = (later >= example.KEYS) & (later < example.KEYS + example.VALUES)
    assert not is_value.any()
    assert asked.sum() == 5 * example.QUERIES
    assert asked.nonzero()[:, 1].min() - 2 * example.PAIRS >= example.GAP
    for row, place in asked.nonzero().tolist():
        at = pairs[row, ::2].tolist().index(int(tokens[row, place]))
        assert targets[row, place] == pairs[row, 2 * at + 1]


def test_bigram_counts(example: ModuleType) -> None:
    # The second character is what follows from the first, but for one in ten: its entropy is that of the draw.
    generator = torch.Generator().manual_seed(4)
    steps = torch.where(torch.rand(60_000, generator=generator) < 0.9, 1, 2)
    data = steps.cumsum(0) % 7
    loss = example.bigram_loss(data[:50_000], [(data[50_000:-1][None], data[50_001:][None])], 7)
    entropy = -(0.9 * math.log(0.9) + 0.1 * math.log(0.1))
    assert abs(loss - entropy) < 0.02
