"""Which cases the kernels are checked on: a pairwise covering design, and full products where it matters most.

    python benchmarks/covering.py           writes covering.json, list and seed
    python benchmarks/covering.py --check   fails if it is not what this script gives

Every pair of values of two factors that may meet stands in at least one case of the design. `delta` has no gate, so it
meets the gate regime `zero` alone. At g = 0 the erase term follows the key (tests/inputs.py), so that nothing expands;
recurrences that do expand are cases of their own, in float32.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import random
import sys
import zlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("covering.json")
SEED = 20
CANDIDATES = 24

VARIANTS = (
    "gdn", "kda", "dplr", "dplr_absorbed", "gdn2_clipped", "delta", "simple_gla", "gla", "gdn2", "rwkv7", "comba"
)  # fmt: skip
DTYPES = ("float32", "bfloat16", "float16", "bfloat16+float32")
SIZES = (16, 60, 64, 100, 128, 192, 256)
LENGTHS = (1, 63, 64, 65, 1000, 4096)
GROUPS = (1, 2)
STATES = ("none", "in", "out", "both")
GATES = ("weak", "mild", "strong", "spikes", "zero")

Value = str | int

FACTORS: dict[str, tuple[Value, ...]] = {
    "variant": VARIANTS,
    "dtype": DTYPES,
    "K": SIZES,
    "V": SIZES,
    "T": LENGTHS,
    "group": GROUPS,
    "states": STATES,
    "gates": GATES,
}
"""`bfloat16+float32`: float32 gates beside bfloat16 streams. `group`: HV / H. `states`: of h0 (in) and ht (out)."""

HEADS = 3
LONG = 4096


@dataclasses.dataclass(frozen=True)
class Case:
    """One call, forward and backward; `group` is HV / H."""

    kind: str
    variant: str
    dtype: str
    K: int
    V: int
    T: int
    group: int
    states: str
    gates: str

    @property
    def B(self) -> int:
        return 1 if self.T >= LONG else 2

    @property
    def H(self) -> int:
        return HEADS

    @property
    def HV(self) -> int:
        return HEADS * self.group

    @property
    def label(self) -> str:
        sizes = f"B{self.B}-T{self.T}-H{self.H}-HV{self.HV}-K{self.K}-V{self.V}"
        return f"{self.kind}:{self.variant}:{self.dtype}:{sizes}:{self.gates}:state-{self.states}"

    @property
    def seed(self) -> int:
        """The inputs depend on what the case is, not on where it stands."""
        return zlib.crc32(self.label.partition(":")[2].encode()) & 0x7FFFFFFF

    @property
    def compiles(self) -> tuple[Value, ...]:
        """Cases with this in common share their kernels."""
        return (self.variant, self.dtype, self.K, self.V, self.group, self.states)

    @classmethod
    def of(cls, row: dict[str, Any]) -> Case:
        return cls(**{field.name: row[field.name] for field in dataclasses.fields(cls)})


# ---------------------------------------------------------------------------------------------------------------------
# The design

Setting = tuple[str, Value]
Pair = tuple[Setting, Setting]


def may_meet(one: Setting, other: Setting) -> bool:
    """False for pairs that make no case: a gate regime, but no gate."""
    met = dict((one, other))
    return met.get("variant") != "delta" or met.get("gates", "zero") == "zero"


def all_pairs() -> set[Pair]:
    """Every pair of values of two factors that may meet, the earlier factor first."""
    return {
        ((f, x), (g, y))
        for f, g in itertools.combinations(FACTORS, 2)
        for x, y in itertools.product(FACTORS[f], FACTORS[g])
        if may_meet((f, x), (g, y))
    }


def pairs_of(row: dict[str, Value]) -> set[Pair]:
    return {((f, row[f]), (g, row[g])) for f, g in itertools.combinations(FACTORS, 2)}


def _pair(one: Setting, other: Setting) -> Pair:
    order = list(FACTORS)
    return (one, other) if order.index(one[0]) < order.index(other[0]) else (other, one)


def _candidate(missing: set[Pair], rng: random.Random) -> dict[str, Value]:
    """A row begun with the setting that most missing pairs want, then filled greedily, factors in random order."""
    wanted = Counter(setting for pair in sorted(missing, key=str) for setting in pair)
    most = max(wanted.values())
    first = rng.choice([s for s, n in wanted.items() if n >= most - 1])
    row = dict([first])
    rest = [f for f in FACTORS if f != first[0]]
    rng.shuffle(rest)
    for factor in rest:
        allowed = [x for x in FACTORS[factor] if all(may_meet(item, (factor, x)) for item in row.items())]
        gain = {x: sum(_pair(item, (factor, x)) in missing for item in row.items()) for x in allowed}
        best = max(gain.values())
        row[factor] = rng.choice([x for x in allowed if gain[x] == best])
    return {factor: row[factor] for factor in FACTORS}


def design(seed: int = SEED) -> list[Case]:
    """Rows that cover every pair, each the best of some candidates: greedy, the same for the same seed."""
    rng = random.Random(seed)
    missing, rows = all_pairs(), []
    while missing:
        candidates = [_candidate(missing, rng) for _ in range(CANDIDATES)]
        best = max(candidates, key=lambda row: len(missing & pairs_of(row)))
        missing -= pairs_of(best)
        rows.append(Case("pairs", **best))  # type: ignore[arg-type]
    return rows


def product() -> Iterator[Case]:
    """dtype, T, HV / H and gates in full, for the two variants that the rest is folded from."""
    for variant, size in itertools.product(("kda", "dplr"), (64, 128)):
        for dtype, T, group, gates in itertools.product(DTYPES, LENGTHS, GROUPS, GATES):
            yield Case("product", variant, dtype, size, size, T, group, "both", gates)


def expanding() -> Iterator[Case]:
    """b unrelated to a at g = 0: the state grows without bound, so float32 alone, and not for long."""
    for variant, T in itertools.product(("dplr", "dplr_absorbed", "rwkv7", "comba"), (65, 1000)):
        yield Case("expand", variant, "float32", 64, 64, T, 1, "both", "expand")


def cases(pairs: list[Case]) -> list[Case]:
    return [*pairs, *product(), *expanding()]


def load() -> list[Case]:
    """The committed list."""
    return [Case.of(row) for row in json.loads(FILE.read_text())["cases"]]


def written() -> str:
    pairs = design()
    rows = ",\n  ".join(json.dumps(dataclasses.asdict(case)) for case in cases(pairs))
    counts = {"pairs covered": len(all_pairs()), "pairwise cases": len(pairs), "cases": len(cases(pairs))}
    head = json.dumps({"seed": SEED, **counts, "factors": {k: list(v) for k, v in FACTORS.items()}})
    return f'{head[:-1]}, "cases": [\n  {rows}\n]}}\n'


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--check", action="store_true", help="compare with covering.json instead of writing it")
    args = parser.parse_args()
    text = written()
    if args.check:
        if not FILE.exists() or FILE.read_text() != text:
            print(f"{FILE.name} is not what covering.py gives", file=sys.stderr)
            return 1
        return 0
    FILE.write_text(text)
    kinds = Counter(case.kind for case in load())
    print(f"{FILE.name}: seed {SEED}, {len(all_pairs())} pairs in {kinds['pairs']} cases; {dict(kinds)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
