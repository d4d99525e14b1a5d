"""The command line: ``dplrgen list``, ``emit``, ``explain``, ``verify`` and ``doctor``.

A user's error is one line on stderr and exit code 2; exit code 1 says that what was checked is not as it should be.
``list``, ``emit`` and ``explain`` import no torch, so they start in a fraction of a second and run where it is absent.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

import dplrgen
from dplrgen import codegen, compile_hook, explain, picture
from dplrgen.errors import BindingError, DplrgenError, UnknownNameError
from dplrgen.variants import VARIANTS, Variant, get

__all__ = ["main"]

_DEFAULT_FOLDER = Path("generated")
_DTYPES = ("float32", "bfloat16", "float16", "float64")


class UsageError(DplrgenError):
    """The command line is not one that is understood."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and give its exit code: 0, 1 where a check fails, 2 for a user's error."""
    try:
        code = _run(sys.argv[1:] if argv is None else list(argv))
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # the reader has seen enough, as in `dplrgen explain ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except KeyboardInterrupt:
        return 130
    except DplrgenError as error:
        return _refuse(str(error))
    except OSError as error:
        return _refuse(f"{error.filename}: {error.strerror}" if error.filename else str(error))
    except ModuleNotFoundError as error:
        if error.name not in ("torch", "triton"):
            raise
        return _refuse(f"this needs {error.name}, which is not installed")


def _refuse(message: str) -> int:
    """One line, whatever the message."""
    print(f"dplrgen: {' '.join(message.split())}", file=sys.stderr)
    return 2


# ---------------------------------------------------------------------------------------------------------------------
# Arguments


class _Parser(argparse.ArgumentParser):
    """argparse with errors that are raised."""

    def error(self, message: str) -> NoReturn:
        choice = re.fullmatch(r"argument (--[a-z-]+): invalid choice: '(.*)' \(choose from (.*)\)", message)
        if choice:
            raise UnknownNameError(f"value of {choice[1]}", choice[2], re.findall(r"[\w-]+", choice[3]))
        raise UsageError(message)


def _run(argv: list[str]) -> int:
    parser, commands = _parsers()
    command = next((word for word in argv if not word.startswith("-")), None)
    if command is not None and command not in commands:
        raise UnknownNameError("command", command, commands)
    known = set(re.findall(r"--[a-z-]+", (parser if command is None else commands[command]).format_help()))
    for word in argv:
        option = word.partition("=")[0]
        if option.startswith("--") and option not in known:
            raise UnknownNameError("option", option, known)
    arguments = parser.parse_args(argv)
    if command is None:
        raise UsageError(f"no command given, expected one of {', '.join(commands)}; --help says more")
    handler: Callable[[argparse.Namespace], int] = arguments.handler
    return handler(arguments)


def _parsers() -> tuple[_Parser, dict[str, argparse.ArgumentParser]]:
    parser = _Parser("dplrgen", description="From a token recurrence to chunked linear-attention operators.")
    parser.add_argument("--version", action="version", version=f"dplrgen {dplrgen.__version__}")
    made = parser.add_subparsers(title="commands", metavar="COMMAND")
    commands: dict[str, argparse.ArgumentParser] = {}

    def command(name: str, handler: Callable[[argparse.Namespace], int], help: str) -> argparse.ArgumentParser:
        commands[name] = made.add_parser(name, help=help, description=f"{help[0].upper()}{help[1:]}.")
        commands[name].set_defaults(handler=handler)
        return commands[name]

    command("list", _list, "list the variants")
    emit = command("emit", _emit, "write the operator of a variant, or of all, as a file that stands alone")
    which = emit.add_mutually_exclusive_group(required=True)
    _add_variant(which, required=False)
    which.add_argument("--all", action="store_true", help="every variant of the package")
    emit.add_argument("--out", type=Path, default=_DEFAULT_FOLDER, metavar="DIR", help="where to; default: generated")
    emit.add_argument("--check", action="store_true", help="write nothing; exit 1 and name each file that is not fresh")
    account = command("explain", _explain, "show what each pass does to a variant, and what its kernels cost")
    _add_variant(account)
    account.add_argument("--backward", action="store_true", help="the backward instead of the forward")
    formats = ("text", "svg", "mermaid")
    account.add_argument("--format", choices=formats, default="text", help="svg and mermaid draw the kernels' graph")
    numerics = command("verify", _verify, "hold an operator against a token loop in float64 on this machine")
    _add_variant(numerics)
    numerics.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda if there is one")
    numerics.add_argument(
        "--dtype", choices=_DTYPES, nargs="+", default=["float32", "bfloat16"], help="default: float32 bfloat16"
    )
    command("doctor", _doctor, "say what this machine has and which back ends work on it")
    return parser, commands


def _add_variant(parser: argparse._ActionsContainer, required: bool = True) -> None:
    help = "a name from the list, or path/to/file.py:name"
    parser.add_argument("--variant", required=required, metavar="NAME", help=help)


def _variant(reference: str) -> Variant:
    """A variant of the package, or the record that ``path/to/file.py:name`` names."""
    if ":" not in reference and not reference.endswith(".py"):
        return get(reference)
    if reference.endswith(".py"):
        raise BindingError(f"{reference}: expected the record's name too, as in {reference}:NAME")
    try:
        return compile_hook.load_variant(reference)
    except DplrgenError:
        raise
    except (Exception, SystemExit) as error:  # whatever the user's file raises is the user's error
        raise BindingError(f"{reference}: {type(error).__name__}: {error}") from error


# ---------------------------------------------------------------------------------------------------------------------
# Commands


def _list(arguments: argparse.Namespace) -> int:
    rows = [(_call(variant), _decay(variant), variant.about) for variant in VARIANTS.values()]
    widths = [max(len(row[i]) for row in rows) for i in (0, 1)]
    for call, decay, about in rows:
        print(f"{call:{widths[0]}}  {decay:{widths[1]}}  {about}")
    return 0


def _call(variant: Variant) -> str:
    return f"{variant.name}({', '.join(name for name, _, _ in variant.signature())})"


def _decay(variant: Variant) -> str:
    if variant.decay.op == "const":
        return "no decay"
    return "decay a channel" if variant.decay.axes else "decay a head"


def _emit(arguments: argparse.Namespace) -> int:
    variants = list(VARIANTS.values()) if arguments.all else [_variant(arguments.variant)]
    if arguments.check:
        return _check(variants, arguments.out)
    for variant in variants:
        if VARIANTS.get(variant.name) != variant and _is_of_the_package(arguments.out):
            raise UsageError(
                f"--out {arguments.out}: dplrgen's own operators are there; write {variant.name} elsewhere"
            )
        print(codegen.emit(variant, arguments.out))
    return 0


def _is_of_the_package(folder: Path) -> bool:
    """Whether ``dplrgen.ops`` loads its operators from the folder."""
    spec = importlib.util.find_spec("dplrgen.generated")
    return spec is not None and any(
        Path(x).resolve() == folder.resolve() for x in spec.submodule_search_locations or ()
    )


def _check(variants: Sequence[Variant], folder: Path) -> int:
    """Name each file that is missing or does not hold what would be written."""
    found = {folder / f"{variant.name}.py": codegen.render(variant) for variant in variants}
    bad = 0
    for path, text in found.items():
        state = _state(path, text)
        if state:
            print(f"{path} is {state}")
            bad += 1
    return 1 if bad else 0


def _state(path: Path, text: str) -> str:
    """Empty for a fresh file. Bytes are compared: line ends count."""
    if not path.is_file():
        return "missing"
    return "" if path.read_bytes() == text.encode() else "stale"


def _explain(arguments: argparse.Namespace) -> int:
    variant = _variant(arguments.variant)
    if arguments.format == "text":
        print(explain.explain(variant, arguments.backward), end="")
        return 0
    plans = codegen.plans(variant)
    drawn = picture.picture(plans.backward if arguments.backward else plans.forward)
    print(picture.svg(drawn) if arguments.format == "svg" else picture.mermaid(drawn), end="")
    return 0


def _verify(arguments: argparse.Namespace) -> int:
    variant = _variant(arguments.variant)
    import torch

    from dplrgen import verify

    device = arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device cuda: torch sees no CUDA device")
    if device == "cuda" and "float64" in arguments.dtype:
        raise UsageError("--dtype float64 is for the CPU")
    text, good = verify.report(variant, device, [getattr(torch, name) for name in arguments.dtype])
    print(text, end="")
    return 0 if good else 1


def _doctor(arguments: argparse.Namespace) -> int:
    from dplrgen import doctor

    text, good = doctor.doctor()
    print(text, end="")
    return 0 if good else 1
