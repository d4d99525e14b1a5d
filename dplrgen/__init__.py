"""dplrgen: from the token recurrence of a linear-attention layer to its chunked kernels, forward and backward.

    dplrgen.ops.kda(q, k, v, g, beta)     a generated operator
    dplrgen.build(variant)                the operator of a record of your own

Importing this package imports neither torch nor triton; an operator's module is loaded on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dplrgen import ops
    from dplrgen.compile_hook import build
    from dplrgen.variants import VARIANTS, Variant

__all__ = ["VARIANTS", "Variant", "__version__", "build", "ops"]

__version__ = "0.1.0"

_WHERE = {
    "build": ("dplrgen.compile_hook", "build"),
    "ops": ("dplrgen.ops", None),
    "Variant": ("dplrgen.variants", "Variant"),
    "VARIANTS": ("dplrgen.variants", "VARIANTS"),
}


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'dplrgen' has no attribute {name!r}")
    module, attribute = _WHERE[name]
    loaded = importlib.import_module(module)
    return loaded if attribute is None else getattr(loaded, attribute)


def __dir__() -> list[str]:
    return sorted(__all__)
