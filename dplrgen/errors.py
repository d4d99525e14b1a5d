"""The exception tree.

    DplrgenError
    |-- BindingError (ValueError)    a variant's record is wrong: the expression and the reason
    |-- IRError (TypeError)          an expression or a program breaks a rule of the IR
    `-- UnknownNameError (KeyError)  a name that is not there, with the nearest that is

Generated operators raise built-in exceptions only, since a generated file stands alone.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = ["BindingError", "DplrgenError", "IRError", "UnknownNameError"]


class DplrgenError(Exception):
    """Base of all errors that the compiler raises."""


class BindingError(DplrgenError, ValueError):
    """A variant's record is wrong."""


class IRError(DplrgenError, TypeError):
    """An expression or a program breaks a rule of the IR."""


class UnknownNameError(DplrgenError, KeyError):
    """A name that is not there; the message suggests the nearest."""

    def __init__(self, kind: str, name: str, known: Iterable[str]) -> None:
        names = sorted(known)
        near = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
        hint = f"; did you mean {near[0]!r}?" if near else f"; known: {', '.join(names)}"
        super().__init__(f"unknown {kind} {name!r}{hint}")

    def __str__(self) -> str:  # KeyError would print the repr of the message
        return str(self.args[0])
