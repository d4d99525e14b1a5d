"""The contract of every op on the CPU; benchmarks/check_contract.py runs the same checks on a GPU."""

from __future__ import annotations

import contract
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from oracles import ORACLES

from dplrgen import ops

ASKED = [(name, check) for check in contract.CHECKS for name in ORACLES if contract.asks(check, name)]


@pytest.mark.parametrize(("name", "check"), ASKED, ids=lambda x: x if isinstance(x, str) else x.__name__)
def test_the_contract(name: str, check) -> None:
    assert check(name, contract.Place()) == []


@pytest.mark.parametrize(
    "check", [contract.strong_gates, contract.hard_keys, contract.layouts], ids=lambda f: f.__name__
)
def test_the_contract_in_16_bits(check) -> None:
    for dtype in (torch.bfloat16, torch.float16):
        assert check("kda", contract.Place(dtype=dtype)) == []


@settings(max_examples=400, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.fixed_dictionaries({k: st.sampled_from(v) for k, v in contract.CHOICES.items()}), st.integers(0, 2**31))
def test_any_call(choices: dict, seed: int) -> None:
    torch.set_num_threads(1)
    assert contract.check_draw(contract.Draw(**choices, seed=seed), contract.Place()) == []


def test_the_checks_see_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each sees what it is for: an op that mixes rows, peeks ahead, drops the state or ignores strides."""
    right, place = ops.kda, contract.Place()

    def wrong(change):
        def op(*streams, initial_state=None, **options):
            return change(lambda *s, h=initial_state: right(*s, initial_state=h, **options), streams, initial_state)

        return op

    faults = {
        contract.rows_alone: lambda f, s, h: f(*(x + 1e-6 * x.mean(0, keepdim=True) for x in s)),
        contract.causal: lambda f, s, h: f(*(x + 1e-6 * x.mean(1, keepdim=True) for x in s)),
        contract.hand_off: lambda f, s, h: f(*s, h=None),
        contract.packed: lambda f, s, h: f(*(x + 1e-6 * x.mean(1, keepdim=True) for x in s)),
        contract.layouts: lambda f, s, h: f(*(x.as_strided(x.shape, torch.empty(x.shape).stride()) for x in s)),
        contract.strong_gates: lambda f, s, h: f(*s[:3], s[3].clamp(min=-5), s[4]),
        contract.repeats: lambda f, s, h: f(*(x + 1e-4 * torch.rand_like(x) for x in s)),
    }
    for check, change in faults.items():
        monkeypatch.setattr(ops, "kda", wrong(change), raising=False)
        assert check("kda", place) != [], check.__name__
