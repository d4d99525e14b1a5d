"""The generated operators: ``dplrgen.ops.<variant>``, loaded on first use.

Each is the public function of ``dplrgen.generated.<variant>``; loading one loads no other.
"""

from __future__ import annotations

import importlib
from typing import Any

from dplrgen.errors import UnknownNameError
from dplrgen.variants import VARIANTS

__all__ = sorted(VARIANTS)


def __getattr__(name: str) -> Any:
    if name.startswith("_"):
        raise AttributeError(name)
    if name not in VARIANTS:
        raise AttributeError(str(UnknownNameError("operator", name, VARIANTS)))
    operator = getattr(importlib.import_module(f"dplrgen.generated.{name}"), name)
    globals()[name] = operator  # the next look-up is a plain one
    return operator


def __dir__() -> list[str]:
    return __all__
