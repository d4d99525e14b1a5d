"""Loads generated modules: those of the package, and those built for a user's own variant.

The operators register themselves when their module is loaded (a generated file stands alone), so this is all that
torch.compile needs from the package: the ops exist before a call is traced.
"""

from __future__ import annotations

import difflib
import errno
import hashlib
import importlib.util
import os
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from dplrgen import codegen
from dplrgen.errors import BindingError
from dplrgen.variants import Variant

__all__ = ["build", "cache_folder", "load", "load_variant"]


#: A module is in sys.modules before it is complete: one thread at a time loads.
_LOCK = threading.RLock()


def cache_folder() -> Path:
    """Where built modules are kept: ``dplrgen`` in the cache folder, or the temporary one if it is read-only."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dplrgen"
    try:
        base.mkdir(parents=True, exist_ok=True)
        if os.access(base, os.W_OK):
            return base
    except OSError:
        pass
    user = os.getuid() if hasattr(os, "getuid") else None
    base = Path(tempfile.gettempdir()) / f"dplrgen-{'user' if user is None else user}"
    base.mkdir(mode=0o700, parents=True, exist_ok=True)
    # What lies there is run: nobody else may have made it or may write to it.
    status = base.stat()
    if user is not None and (status.st_uid != user or status.st_mode & 0o022):
        raise PermissionError(
            errno.EACCES, "can be written by others; set XDG_CACHE_HOME to a folder of your own", str(base)
        )
    return base


def load(path: Path, name: str | None = None) -> ModuleType:
    """Import a generated file from its path (Triton reads kernels from real files)."""
    name = name or f"dplrgen_file_{path.stem}_{hashlib.sha256(path.read_bytes()).hexdigest()[:8]}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"cannot load {path}")
    module = importlib.util.module_from_spec(spec)
    with _LOCK:
        sys.modules[name] = module
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
    return module


def build(variant: Variant) -> Callable[..., Any]:
    """The operator of a variant's record: compiled, written to the cache folder by digest, and loaded.

    The same record gives the same operator, in this process and later ones; threads and processes may build it at
    once. ``op.__module__`` names its module, which another process must build before it unpickles the operator.

    Raises:
        BindingError: the argument is not a Variant.
    """
    if not isinstance(variant, Variant):
        raise BindingError(f"build takes a dplrgen.Variant, got {type(variant).__name__}")
    text = codegen.render(variant)
    name = f"dplrgen_built_{variant.name}_{hashlib.sha256(text.encode()).hexdigest()[:12]}"
    with _LOCK:
        if name not in sys.modules:
            path = cache_folder() / f"{name}.py"
            codegen.write_if_changed(path, text)
            load(path, name)
        operator: Callable[..., Any] = getattr(sys.modules[name], variant.name)
    return operator


def load_variant(reference: str) -> Variant:
    """The record that ``path/to/file.py:name`` names.

    Raises:
        BindingError: no such file, no such name, or not a Variant.
    """
    file, _, attribute = reference.rpartition(":")
    path = Path(file)
    if not path.is_file():
        raise BindingError(f"{reference}: no file {file!r}")
    spec = importlib.util.spec_from_file_location(f"dplrgen_user_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise BindingError(f"{reference}: {file!r} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[module.__name__] = module  # a dataclass in the file looks itself up there
    try:
        spec.loader.exec_module(module)
    except BindingError:
        raise
    except Exception as error:
        first = str(error).partition("\n")[0]
        raise BindingError(f"{reference}: {type(error).__name__}: {first}") from error
    variant = getattr(module, attribute, None)
    if not isinstance(variant, Variant):
        found = "nothing" if variant is None else type(variant).__name__
        there = [name for name, value in vars(module).items() if isinstance(value, Variant)]
        near = difflib.get_close_matches(attribute, there, n=1, cutoff=0.5)
        hint = f"; did you mean {near[0]!r}?" if near and variant is None else ""
        raise BindingError(f"{reference}: {attribute!r} must be a dplrgen.Variant, found {found}{hint}")
    return variant
