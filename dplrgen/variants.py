"""The bindings: one frozen record a variant.

Every variant is the master recurrence

    S_t = S_{t-1} Diag(alpha_t) (I - b_t a_t^T) + v_t k_t^T        o_t = scale * S_t q_t

with its five streams (decay, a, b, k, v) given as expressions over the variant's own inputs. Nothing else of the
package knows a variant: chunking, folding, the backward and the kernels follow from the record.
"""

from __future__ import annotations

import builtins
import difflib
import keyword
import math
import re
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields, replace
from typing import Any

from dplrgen.errors import BindingError, UnknownNameError
from dplrgen.ir import (
    Node,
    const,
    constants,
    exp,
    gate,
    key,
    log,
    minimum,
    norm,
    safe_div,
    show,
    sqrt,
    topological,
    value,
)
from dplrgen.ir import dot as inner

__all__ = ["VARIANTS", "Variant", "clip", "get"]

_ROLES = {"key": "a key-like input", "value": "the value input", "gate": "a gate"}
#: Names that the generated code gives to other things.
_RESERVED = frozenset(
    [
        "scale",
        "initial_state",
        "output_final_state",
        "cu_seqlens",
        "check",
        "save",
        "needs",
        "state",
        "states",
        "dstate",
        "do",
        "dht",
        "dh0",
        "o",
        "final_state",
        "initial",
        "last",
        "none",
        "shared",
        "own",
        "given",
        "like",
        "like_v",
        "lead",
        "dtype",
        "tile",
        "head",
        "head_v",
        "chunk",
        "batch",
        "start",
        "row",
        "rows",
        "chunks",
        "chunk_first",
        "chunk_count",
        "token_first",
        "token_end",
        "sequences",
        "places",
        "slot",
        "sizes",
        "far_k",
        "far_v",
        "slots",
        "there",
        "inside",
        "indices",
        "inplace",
        "state_indices",
        "state_next",
        "packed",
        "lane",
        "step",
        "level",
        "edge",
        "blocks",
        "decay",
        "wide",
        "stored",
        "saved",
        "final",
        "cpu",
        "streams",
        "tensors",
        "factor",
        "second",
        "col_k",
        "col_v",
        "in_c",
        "in_k",
        "in_v",
        "k0",
        "v0",
        "torch",
        "tl",
        "triton",
    ]
)
#: What a generated file imports.
_MODULES = frozenset(["contextlib", "functools", "itertools", "numbers", "torch", "triton", "tl"])
#: Names that the generated code makes from others.
_MADE = re.compile(
    r".*_(ptr|out|here|all|16|edge|stride_[bthc])|(kept|end|left|right|operand|cotangent|made|decay|saved)_.*"
)


def _is_word(name: str) -> bool:
    return re.fullmatch(r"[a-z][a-z0-9_]*", name) is not None and not keyword.iskeyword(name)


@dataclass(frozen=True)
class Variant:
    """A binding of the master recurrence.

    Args:
        name: the public name, a Python identifier.
        inputs: the tensors of the signature, in order: leaves made by ``key``, ``value`` and ``gate``.
        decay: alpha, in [0, 1]: one number a head (axes ``()``) or a channel (``("K",)``).
        a, b: the erase pair, ``("K",)``; ``const(0)`` for b means that nothing is erased.
        k, v: what is written, ``("K",)`` and ``("V",)``.
        q: what is read with; the input named q unless given.
        about: one line for the header and ``dplrgen list``.

    Raises:
        BindingError: an unknown input, a stream of the wrong shape, or one that reads the state.
    """

    name: str
    inputs: tuple[Node, ...]
    decay: Node
    a: Node
    b: Node
    k: Node
    v: Node
    q: Node | None = None
    about: str = ""

    def __new__(cls, *args: Any, **given: Any) -> Variant:
        """As a record is made, but for a field that is not one, or is missing, which is a fault of the binding."""
        name = given.get("name", args[0] if args else "")
        known = {f.name: f.default is MISSING for f in fields(cls)}
        for field in given:
            if field not in known:
                near = difflib.get_close_matches(field, known, n=1)
                hint = f"; did you mean {near[0]!r}?" if near else f" (streams: {', '.join(_AXES)})"
                raise BindingError(f"{name}: {field!r} is not a stream{hint}")
        missing = [f for f in list(known)[len(args) :] if known[f] and f not in given]
        if missing and given:
            raise BindingError(f"{name}: no {' and no '.join(missing)} given")
        return super().__new__(cls)

    def __post_init__(self) -> None:
        if not _is_word(self.name):
            raise BindingError(f"variant name must be a lower-case identifier, got {self.name!r}")
        if self.name in dir(builtins) or self.name in _MODULES:
            raise BindingError(f"variant name {self.name!r} is that of something the generated file uses")
        if not self.about.isprintable() or '"' in self.about or "\\" in self.about:
            raise BindingError(f"{self.name}: about must be one line without quotes or backslashes, got {self.about!r}")
        object.__setattr__(self, "inputs", tuple(self.inputs))
        given: tuple[Any, ...] = self.inputs  # what a caller passes, whatever the annotation says
        for n in given:
            if not isinstance(n, Node) or n.op != "input" or dict(n.attrs).get("role") not in _ROLES:
                found = show(n) if isinstance(n, Node) else repr(n)
                raise BindingError(f"{self.name}: inputs must be leaves made by key, value or gate, got {found}")
        for role in ("key", "value"):
            if all(n.attr("role") != role for n in self.inputs):
                raise BindingError(f"{self.name}: no {role} input: its sizes and heads are read from one")
        names = [str(n.attr("name")) for n in self.inputs]
        for label in names:
            if names.count(label) > 1:
                raise BindingError(f"{self.name}: input {label!r} is declared twice")
            made = _MADE.fullmatch(label) or (label[:1] == "d" and label[1:] in names)
            if label in _RESERVED or made or label in dir(builtins) or not _is_word(label):
                raise BindingError(f"{self.name}: input name {label!r} is reserved or not a lower-case identifier")
        if self.q is None:
            if "q" not in names:
                raise BindingError(f"{self.name}: no input named 'q' and no expression given for q")
            object.__setattr__(self, "q", self.inputs[names.index("q")])
        for stream, expression in self.streams().items():
            self._check(stream, expression, _AXES[stream])

    def _check(self, stream: str, expression: Node, allowed: tuple[tuple[str, ...], ...]) -> None:
        if not isinstance(expression, Node):
            raise BindingError(f"{self.name}: stream {stream} must be an expression, got {expression!r}")
        text = f"{self.name}: stream {stream} = {show(expression)}"
        for n in topological([expression]):
            if n.op in ("param", "run") or n.axes[:1] == ("C",):
                raise BindingError(f"{text} must be written over one token's inputs, found {show(n)}")
            if n.op == "input" and n not in self.inputs:
                if n.axes == ("K", "V") or dict(n.attrs).get("role") == "state":
                    raise BindingError(f"{text} reads the state; streams may read inputs only")
                known = ", ".join(str(i.attr("name")) for i in self.inputs)
                raise BindingError(f"{text} reads {show(n)!r}, which is not an input (inputs: {known})")
        numbers = constants(expression)
        for n, x in numbers.items():
            if not math.isfinite(x):
                raise BindingError(f"{text} must be finite, found {show(n)}")
        if stream == "decay" and not 0.0 < numbers.get(expression, 1.0) <= 1.0:
            raise BindingError(f"{text} must be in (0, 1]")
        if expression.axes not in allowed and expression.op != "const":
            want = " or ".join("[" + ", ".join(a) + "]" for a in allowed)
            raise BindingError(f"{text} must have axes {want}, got [{', '.join(expression.axes)}]")

    def streams(self) -> dict[str, Node]:
        """The streams by name."""
        assert self.q is not None
        return {"q": self.q, "decay": self.decay, "a": self.a, "b": self.b, "k": self.k, "v": self.v}

    def signature(self) -> list[tuple[str, str, tuple[str, ...]]]:
        """(name, head count symbol, axes) of each input."""
        return [(str(n.attr("name")), str(n.attr("heads")), n.axes) for n in self.inputs]

    def binding(self) -> list[str]:
        """The record as equations, for headers and ``explain``."""
        lines = [f"alpha = {show(self.decay)}"]
        return lines + [f"{s} = {show(e)}" for s, e in self.streams().items() if s != "decay"]

    def renamed(self, name: str) -> Variant:
        return replace(self, name=name)


_AXES: Mapping[str, tuple[tuple[str, ...], ...]] = {
    "q": (("K",),),
    "decay": ((), ("K",)),
    "a": (("K",),),
    "b": (("K",),),
    "k": (("K",),),
    "v": (("V",),),
}


def clip(decay: Node, x: Node, y: Node) -> Node:
    """``min(alpha, 1 / rho)``, rho the spectral norm of ``I - x y^T`` (Scientific Spaces 11945), rounding well.

    ``n - x.y`` is formed as ``(n / 2) |x/|x| - y/|y||^2``: parallel vectors give exactly 1 and the clip stays inactive.
    """
    size = norm(x) * norm(y)
    apart = safe_div(x, norm(x)) - safe_div(y, norm(y))
    root = sqrt((size - 2.0) * (size - 2.0) + 2.0 * size * inner(apart, apart))
    rho = 0.5 * (size + root)
    return exp(minimum(log(decay), -log(rho)))


q, k, v = key("q"), key("k"), value("v")
a, b, d, j, p = key("a"), key("b"), key("d"), key("j"), key("p")
g, g_head, beta, eta = gate("g", "K"), gate("g"), gate("beta"), gate("eta")
e, w = gate("e", "K"), gate("w", "V")

_ALL = (
    Variant(
        name="gdn",
        inputs=(q, k, v, g_head, beta),
        decay=exp(g_head),
        a=k,
        b=beta * k,
        k=k,
        v=beta * v,
        about="Gated DeltaNet",
    ),
    Variant(
        name="kda",
        inputs=(q, k, v, g, beta),
        decay=exp(g),
        a=k,
        b=beta * k,
        k=k,
        v=beta * v,
        about="Kimi Delta Attention",
    ),
    Variant(
        name="dplr",
        inputs=(q, k, v, a, b, g),
        decay=exp(g),
        a=a,
        b=b,
        k=k,
        v=v,
        about="gated diagonal plus low rank, the master form",
    ),
    Variant(
        name="dplr_absorbed",
        inputs=(q, k, v, a, d, g),
        decay=exp(g),
        a=a,
        b=d / exp(g),
        k=k,
        v=v,
        about="gated DPLR with the gate absorbed: S (Diag(alpha) - d a^T)",
    ),
    Variant(
        name="gdn2_clipped",
        inputs=(q, k, j, v, g, eta),
        decay=clip(exp(g), eta * k, j),
        a=j,
        b=eta * k,
        k=k,
        v=eta * v,
        about="GDN2 with its decay clipped at the spectral norm of the erase step",
    ),
    Variant(
        name="delta",
        inputs=(q, k, v, beta),
        decay=const(1),
        a=k,
        b=beta * k,
        k=k,
        v=beta * v,
        about="the delta rule, no decay",
    ),
    Variant(
        name="simple_gla",
        inputs=(q, k, v, g_head),
        decay=exp(g_head),
        a=k,
        b=const(0),
        k=k,
        v=v,
        about="gated linear attention, one decay a head (Mamba-2, RetNet)",
    ),
    Variant(
        name="gla",
        inputs=(q, k, v, g),
        decay=exp(g),
        a=k,
        b=const(0),
        k=k,
        v=v,
        about="gated linear attention, one decay a channel",
    ),
    Variant(
        name="gdn2",
        inputs=(q, k, v, e, w, g),
        decay=exp(g),
        a=k,
        b=e * k,
        k=k,
        v=w * v,
        about="Gated DeltaNet 2: erase and write gates a channel",
    ),
    Variant(
        name="rwkv7",
        inputs=(q, k, v, a, b, g),
        decay=exp(g),
        a=b,
        b=-a / exp(g),
        k=k,
        v=v,
        about="RWKV-7 in flash-linear-attention's signs: S (Diag(alpha) + a b^T)",
    ),
    Variant(
        name="comba",
        inputs=(q, k, v, p, g_head, beta),
        decay=exp(g_head),
        a=k,
        b=beta * p,
        k=k,
        v=beta * v,
        about="Comba: the erase key is an input of its own",
    ),
)

VARIANTS: Mapping[str, Variant] = {variant.name: variant for variant in _ALL}


def get(name: str) -> Variant:
    """The variant of that name; UnknownNameError suggests the nearest."""
    if name not in VARIANTS:
        raise UnknownNameError("variant", name, VARIANTS)
    return VARIANTS[name]
