"""The generated operators: ``dplrgen.ops.<variant>`` and ``dplrgen.ops.<variant>_step``, loaded on first use.

Both are public functions of ``dplrgen.generated.<variant>``; loading one loads no other.
"""

from __future__ import annotations

import importlib
from typing import Any

from dplrgen.errors import UnknownNameError
from dplrgen.variants import VARIANTS

__all__ = sorted(name + end for name in VARIANTS for end in ("", "_step"))


def __getattr__(name: str) -> Any:
    if name.startswith("_"):
        raise AttributeError(name)
    if name not in __all__:
        raise AttributeError(str(UnknownNameError("operator", name, __all__)))
    operator = getattr(importlib.import_module(f"dplrgen.generated.{name.removesuffix('_step')}"), name)
    globals()[name] = operator  # the next look-up is a plain one
    return operator


def __dir__() -> list[str]:
    return __all__
