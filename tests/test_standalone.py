"""A generated file stands alone: copied into another folder, it runs where the package is not.

Each case is a process that sees the standard library, torch and the copy, and whose imports of what must not be needed
are refused. It runs forward and backward on the CPU and writes the results; they are judged here.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import metrics
import pytest
import torch
from inputs import make
from oracles import names

GENERATED = Path(__file__).parents[1] / "generated"
VARIANT = "kda"
SIZES = (2, 70, 1, 2, 20, 18)

PREAMBLE = """
import sys

refused, site, folder = {refused!r}, {site!r}, {folder!r}


class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in refused:
            raise ImportError("refused: " + name)


sys.meta_path.insert(0, Refuse())
sys.path.extend(p for p in site if p not in sys.path)
import importlib.util
import torch

torch.set_num_threads(1)


def load(name, file="{variant}.py"):
    spec = importlib.util.spec_from_file_location(name, folder + "/" + file)
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


given = torch.load(folder + "/given.pt")
results = {{}}


def run(label, op):
    streams = [x.detach().requires_grad_() for x in given["streams"]]
    h0 = given["h0"].detach().requires_grad_()
    o, ht = op(*streams, initial_state=h0, output_final_state=True)
    grads = torch.autograd.grad((o, ht), (*streams, h0), (given["do"], given["dht"]))
    results[label] = [o.detach(), ht.detach(), *grads]


"""

POSTSCRIPT = """
torch.save(results, folder + "/results.pt")
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The copy and what to run it on."""
    shutil.copy(GENERATED / f"{VARIANT}.py", tmp_path)
    streams, h0, do, dht = make(VARIANT, *SIZES, torch.float32, seed=90)
    given = {"streams": [x.detach() for x in streams], "h0": h0.detach(), "do": do, "dht": dht}
    torch.save(given, tmp_path / "given.pt")
    return tmp_path


def run_script(folder: Path, body: str, refused: tuple[str, ...] = ("dplrgen",), isolated: bool = True) -> list[str]:
    """Run the body in a process of its own; the labels of its results, each of which equals the token loop."""
    site = [str(Path(torch.__file__).parents[1])] if isolated else [p for p in sys.path if p]
    text = PREAMBLE.format(refused=refused, site=site, folder=str(folder), variant=VARIANT) + body + POSTSCRIPT
    # -I: no PYTHON* variables, no script folder, no user's packages; -S: no path files, so no editable install.
    command = [sys.executable, *(["-I", "-S"] if isolated else []), "-c", text]
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    results = torch.load(folder / "results.pt")
    failures = {label: wrong for label, found in results.items() if (wrong := failures_of(found))}
    assert not failures
    return sorted(results)


def failures_of(found: list[torch.Tensor]) -> list[str]:
    streams, h0, do, dht = make(VARIANT, *SIZES, torch.float32, seed=90)
    keys = ["o", "ht", *(f"d{n}" for n in names(VARIANT)), "dh0"]
    got = dict(zip(keys, found, strict=True))
    return metrics.check(VARIANT, got, metrics.reference(VARIANT, streams, h0, do, dht), torch.float32, streams)


def test_alone(folder: Path) -> None:
    """Not with the package refused only, but with all that the package needs and the file does not."""
    body = """
module = load("copied")
assert not any("dplrgen" in name for name in sys.modules)
assert module.__all__ == ["kda", "kda_step"]
run("alone", module.kda)
"""
    assert run_script(folder, body, refused=("dplrgen", "generated", "jinja2", "networkx")) == ["alone"]


def test_where_triton_is_absent(folder: Path) -> None:
    body = """
module = load("copied")
assert module.triton is None and "triton" not in sys.modules
run("no triton", module.kda)
"""
    assert run_script(folder, body, refused=("dplrgen", "triton")) == ["no triton"]


def test_under_torch_compile_where_triton_is_absent(folder: Path) -> None:
    body = """
module = load("copied")
compiled = torch.compile(lambda *xs, **kw: module.kda(*xs, **kw), fullgraph=True, backend="aot_eager")
run("traced", compiled)
"""
    assert run_script(folder, body, refused=("dplrgen", "triton")) == ["traced"]


@pytest.mark.parametrize("first", ["package", "copy"])
def test_beside_the_package(folder: Path, first: str) -> None:
    """The copy and the installed file register the same operators once, whichever is loaded first."""
    load_copy, load_package = 'copy = load("copied")', "from dplrgen import ops; package = ops.kda"
    pair = (load_package, load_copy) if first == "package" else (load_copy, load_package)
    body = "\n".join(pair) + '\nrun("copy", copy.kda)\nrun("package", package)\n'
    assert run_script(folder, body, refused=(), isolated=False) == ["copy", "package"]


def test_loaded_twice(folder: Path) -> None:
    """Under two names, loaded again in place, and in use after those loaded before are gone."""
    body = """
import gc, importlib

sys.path.insert(0, folder)
import kda as zero

run("zero", zero.kda)
zero = importlib.reload(zero)
gc.collect()
run("zero, loaded again", zero.kda)
one, two = load("one"), load("two")
assert zero._NAME == one._NAME == two._NAME
run("one", one.kda)
run("two", two.kda)
del sys.modules["kda"], zero, sys.modules["one"], one
gc.collect()
run("two, without the others", two.kda)
"""
    assert len(run_script(folder, body)) == 5


def test_two_versions_side_by_side(folder: Path) -> None:
    """Another digest is another pair of operators: each version runs its own implementation, forward and backward."""
    text = (folder / f"{VARIANT}.py").read_text()
    (digest,) = set(re.findall(rf'_NAME = "{VARIANT}_([0-9a-f]{{8}})"', text))
    (folder / "other.py").write_text(text.replace(digest, "0123abcd"))
    body = """
old, new = load("old"), load("new", "other.py")
assert old._NAME != new._NAME
calls = []


def watched(module, label):
    for name in ("_forward_torch", "_backward_torch"):
        def call(*args, name=name, inner=getattr(module, name)):
            calls.append((label, name))
            return inner(*args)
        setattr(module, name, call)


watched(old, "old")
watched(new, "new")
run("old", old.kda)
run("new", new.kda)
assert calls == [(x, y) for x in ("old", "new") for y in ("_forward_torch", "_backward_torch")], calls
"""
    assert run_script(folder, body) == ["new", "old"]


def test_every_file_imports_torch_and_triton_only() -> None:
    """Read, not run: the import statements of every generated file."""
    allowed = {"torch", "triton", *sys.stdlib_module_names}
    for path in sorted(GENERATED.glob("*.py")):
        found = set(re.findall(r"^\s*(?:from|import) (\w+)", path.read_text(), flags=re.MULTILINE))
        assert found <= allowed, (path.name, found - allowed)


def test_the_refusals_above_refuse(folder: Path) -> None:
    """The isolation itself: where nothing is refused by name, the package is still not there to import."""
    body = """
import importlib.util

assert importlib.util.find_spec("dplrgen") is None, importlib.util.find_spec("dplrgen")
for name in refused:
    try:
        __import__(name)
    except ImportError as error:
        assert str(error) == "refused: " + name
    else:
        raise AssertionError(name)
"""
    assert run_script(folder, body, refused=("jinja2", "networkx")) == []
