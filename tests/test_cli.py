"""The command line: what it writes and prints, its exit codes, and that it starts without torch."""

from __future__ import annotations

import ast
import os
import re
import resource
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from inputs import make
from oracles import ORACLES, SIGNATURES

import dplrgen.generated
from dplrgen import cli, codegen, doctor, explain, picture, verify
from dplrgen.passes import count
from dplrgen.pipeline import BACKWARD, FORWARD
from dplrgen.variants import VARIANTS

torch.set_num_threads(1)

ROOT = Path(__file__).parent.parent

MINE = """
from dplrgen.ir import exp, gate, key, sigmoid, value
from dplrgen.variants import Variant

q, k, v, g, beta = key("q"), key("k"), value("v"), gate("g", "K"), gate("beta")
mine = Variant(name="mine", inputs=(q, k, v, g, beta), decay=exp(g), a=k, b=sigmoid(beta) * k, k=k, v=sigmoid(beta) * v)
number = 3
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder to stand in."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def mine(here: Path) -> str:
    """A user's file with a record, as the command line names it."""
    (here / "mine.py").write_text(MINE, encoding="utf-8")
    return "mine.py:mine"


def process(
    *words: str, cwd: Path, flags: tuple[str, ...] = (), **environment: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *flags, "-m", "dplrgen", *words],
        cwd=cwd,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )


def tree(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


# ---------------------------------------------------------------------------------------------------------------------
# list, emit


def test_list_names_every_variant_with_its_signature(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("(")[0] for line in lines] == list(VARIANTS)
    for line, variant in zip(lines, VARIANTS.values(), strict=True):
        assert line.startswith(f"{variant.name}({', '.join(stream for stream, _ in SIGNATURES[variant.name])})")
        assert line.endswith(variant.about)
    decays = {line.split("(")[0]: re.search(r"no decay|decay a \w+", line)[0] for line in lines}
    assert decays == {n: decay_of(n) for n in VARIANTS}


def decay_of(name: str) -> str:
    shape = dict(SIGNATURES[name]).get("g")
    return "no decay" if shape is None else "decay a channel" if shape.endswith("K") else "decay a head"


def test_emit_writes_to_generated_in_the_current_folder(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["emit", "--variant", "gla"]) == 0
    assert capsys.readouterr().out == f"{Path('generated') / 'gla.py'}\n"
    assert tree(here) == {"generated/gla.py": codegen.render(VARIANTS["gla"]).encode()}


def test_emit_writes_to_out_and_nowhere_else(here: Path) -> None:
    before = tree(ROOT / "generated")
    done = process("emit", "--all", "--out", "a/b", cwd=here)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [f"a/b/{name}.py" for name in VARIANTS]
    assert tree(here) == {f"a/b/{name}.py": codegen.render(v).encode() for name, v in sorted(VARIANTS.items())}
    assert tree(ROOT / "generated") == before


@pytest.mark.parametrize("seed", ["0", "1", "4242"])
def test_emit_gives_the_same_bytes_under_any_hash_seed(here: Path, seed: str) -> None:
    done = process("emit", "--all", "--check", "--out", str(ROOT / "generated"), cwd=here, PYTHONHASHSEED=seed)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert tree(here) == {}


def test_check_names_what_is_stale_or_missing_and_writes_nothing(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = here / "generated"
    assert cli.main(["emit", "--all"]) == 0
    capsys.readouterr()
    assert cli.main(["emit", "--all", "--check"]) == 0
    assert capsys.readouterr().out == ""
    (out / "kda.py").write_bytes((out / "kda.py").read_bytes().replace(b"\n", b"\r\n"))  # line ends count
    (out / "gdn.py").unlink()
    before = tree(here)
    assert cli.main(["emit", "--all", "--check"]) == 1
    assert capsys.readouterr().out == "generated/gdn.py is missing\ngenerated/kda.py is stale\n"
    assert cli.main(["emit", "--variant", "kda", "--check"]) == 1
    assert cli.main(["emit", "--variant", "gla", "--check"]) == 0
    assert tree(here) == before


def test_emit_leaves_a_fresh_file_untouched(here: Path) -> None:
    cli.main(["emit", "--variant", "gla"])
    os.utime("generated/gla.py", (1, 1))
    cli.main(["emit", "--variant", "gla"])
    assert os.stat("generated/gla.py").st_mtime == 1


def test_emit_takes_a_record_from_a_file(here: Path, mine: str) -> None:
    done = process("emit", "--variant", mine, "--out", "made", cwd=here)
    assert (done.returncode, done.stdout) == (0, "made/mine.py\n"), done.stderr
    made = (here / "made" / "mine.py").read_text(encoding="utf-8")
    assert any(isinstance(n, ast.FunctionDef) and n.name == "mine" for n in ast.parse(made).body)
    assert "b = sigmoid(beta) * k" in made


# ---------------------------------------------------------------------------------------------------------------------
# Start


STARTS = [("list",), ("emit", "--variant", "kda"), ("explain", "--variant", "kda"), ("--version",)]


@pytest.mark.parametrize("words", STARTS, ids=lambda words: words[0])
def test_starts_without_torch(here: Path, words: tuple[str, ...]) -> None:
    done = process(*words, cwd=here, flags=("-X", "importtime"))
    imported = {line.rsplit("|", 1)[-1].strip() for line in done.stderr.splitlines() if line.startswith("import time")}
    assert done.returncode == 0
    assert "dplrgen.cli" in imported
    assert not {name for name in imported if name.split(".")[0] in ("torch", "triton", "numpy")}


@pytest.mark.parametrize("words", STARTS, ids=lambda words: words[0])
def test_starts_in_under_a_second(here: Path, words: tuple[str, ...]) -> None:
    """Processor time, the best of three: a busy machine is no failure."""
    assert min(processor_seconds(words, here) for _ in range(3)) < 1.0


def processor_seconds(words: tuple[str, ...], folder: Path) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert process(*words, cwd=folder).returncode == 0
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


# ---------------------------------------------------------------------------------------------------------------------
# Errors: one line, exit code 2

ERRORS = {
    "": "no command given",
    "emmit --all": "unknown command 'emmit'; did you mean 'emit'?",
    "emit": "one of the arguments --variant --all is required",
    "emit --all --variant kda": "not allowed with",
    "explain --variant kda --format svgg": "unknown value of --format 'svgg'; did you mean 'svg'?",
    "verify --variant kda --dtype floot32": "unknown value of --dtype 'floot32'; did you mean 'float32'?",
    "explain --all": "unknown option '--all'; known: --backward",
    "emit --variant": "expected one argument",
    "emit --varient kda": "unknown option '--varient'; did you mean '--variant'?",
    "emit --var kda": "unknown option '--var'; did you mean '--variant'?",
    "emit --variant kdaa": "unknown variant 'kdaa'; did you mean 'kda'?",
    "explain --variant xyz": "unknown variant 'xyz'; known: comba",
    "explain --variant kda --format pdf": "unknown value of --format 'pdf'; known: mermaid, svg, text",
    "explain --variant kda extra": "unrecognized arguments: extra",
    "verify --variant kda --dtype int8": "unknown value of --dtype 'int8'; known: bfloat16, float16, float32, float64",
    "emit --variant kda --out mine.py": "mine.py",
    "emit --variant mine.py": "expected the record's name too, as in mine.py:NAME",
    "emit --variant absent.py:mine": "no file 'absent.py'",
    "emit --variant mine.py:number": "must be a dplrgen.Variant, found int",
    "emit --variant mine.py:nothing": "must be a dplrgen.Variant, found nothing",
    "emit --variant syntax.py:mine": "SyntaxError",
    "emit --variant raises.py:mine": "ZeroDivisionError",
    "emit --variant leaves.py:mine": "SystemExit",
    "emit --variant shape.py:mine": "stream v = q must have axes [V], got [K]",
    "emit --variant state.py:mine": "reads the state",
}

FILES = {
    "mine.py": MINE,
    "syntax.py": "def (",
    "raises.py": "1 / 0",
    "leaves.py": "import sys\nsys.exit(3)",
    "shape.py": MINE.replace("v=sigmoid(beta) * v", "v=q"),
    "state.py": MINE.replace("b=sigmoid(beta) * k", 'b=leaf("S", ("K",), role="state")').replace(
        " key,", " key, leaf,"
    ),
}


@pytest.mark.parametrize("line", ERRORS)
def test_errors_are_one_line(here: Path, capsys: pytest.CaptureFixture[str], line: str) -> None:
    for name, text in FILES.items():
        (here / name).write_text(text, encoding="utf-8")
    before = tree(here)
    assert cli.main(line.split()) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert re.fullmatch(r"dplrgen: .+\n", said.err)
    assert ERRORS[line] in said.err
    assert tree(here) == before


@pytest.mark.parametrize("line", ["emit --variant kdaa", "emit --variant raises.py:mine", ""])
def test_errors_of_the_process(here: Path, line: str) -> None:
    (here / "raises.py").write_text(FILES["raises.py"], encoding="utf-8")
    done = process(*line.split(), cwd=here)
    assert (done.returncode, done.stdout) == (2, "")
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_device_that_is_not_there_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["verify", "--variant", "kda", "--device", "cuda"]) == 2
    assert capsys.readouterr().err == "dplrgen: --device cuda: torch sees no CUDA device\n"


def test_a_missing_torch_is_an_error(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    assert cli.main(["verify", "--variant", "kda"]) == 2
    assert re.fullmatch(r"dplrgen: .*torch.*\n", capsys.readouterr().err)


def test_a_reader_that_leaves_is_no_error(here: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "dplrgen", "explain", "--variant", "dplr", "--backward"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=here,
    ) as running:
        running.stdout.close()
        assert running.stderr.read() == b""
    assert running.returncode == 141


def test_help_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["--help"], ["emit", "--help"], ["--version"]):
        with pytest.raises(SystemExit) as left:
            cli.main(words)
        assert left.value.code == 0
    said = capsys.readouterr().out
    assert "--check" in said
    assert said.endswith("dplrgen 0.1.0\n")


# ---------------------------------------------------------------------------------------------------------------------
# explain

PRODUCTS = {"dplr": 13, "dplr_absorbed": 13, "gdn2_clipped": 13, "rwkv7": 13, "kda": 8, "gdn": 8, "delta": 8, "gdn2": 8}
PRODUCTS |= {"gla": 4, "simple_gla": 4}


def said(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert cli.main(["explain", *words]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("name", VARIANTS)
def test_explain_shows_every_pass_and_counts(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = said(capsys, "--variant", name)
    passes = ["chunkify", *(p for p, _ in FORWARD)]
    assert re.findall(r"^== (\w+):", text, re.M)[: len(passes)] == passes
    for line in VARIANTS[name].binding():
        assert f"    {line}\n" in text
    table = {
        row.split()[0]: row.split()[1:] for row in text.split("== the counts")[1].split("\n\n")[0].splitlines()[2:]
    }
    assert list(table) == passes
    if name in PRODUCTS:
        assert int(table["pad"][0]) == PRODUCTS[name]
        assert f"The program's {PRODUCTS[name]} tile products are" in text


def test_explain_says_which_rule_fired_where(capsys: pytest.CaptureFixture[str]) -> None:
    text = said(capsys, "--variant", "kda")
    fold = text.split("== fold")[1].split("== hoist")[0]
    assert "fired merge-products x2 at\n" in fold
    assert re.search(r"fired absorb-solve x1 at\n +\(beta \* v\) \+ -solve.*\n +-> solve\(", fold)
    assert "counts products 9 -> 6, solves 1, exponentials 3" in fold
    assert "fired absorb-gate" not in text
    assert "fired absorb-gate x1" in said(capsys, "--variant", "dplr_absorbed")


@pytest.mark.parametrize("name", ["kda", "dplr", "gla"])
def test_explain_backward(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = said(capsys, "--variant", name, "--backward")
    passes = ["differentiate", *(p for p, _ in BACKWARD)]
    assert re.findall(r"^== (\w+):", text, re.M)[: len(passes)] == passes
    assert "return dg = " in text
    kernels = codegen.plans(VARIANTS[name]).backward.kernels
    rows = text.split("== as lowered")[1].split("\n\n")[0].splitlines()[2:]
    assert [row.split()[0] for row in rows] == [*(k.name for k in kernels), "all"]


@pytest.mark.parametrize("name", VARIANTS)
def test_the_products_as_lowered_are_those_of_the_emitted_kernels(name: str) -> None:
    sizes = explain.usual()
    emitted = emitted_products(codegen.render(VARIANTS[name]), sizes.levels)
    for side in explain.sides(VARIANTS[name], sizes):
        assert {f"_{side.name}_{row.name}": row.total for row in side.launches} == {
            kernel: n for kernel, n in emitted.items() if kernel.startswith(f"_{side.name}_")
        }


def emitted_products(text: str, levels: int) -> dict[str, int]:
    """Products in each kernel's text, in bfloat16: calls, times the levels of the loops that they stand in."""
    functions = [n for n in ast.parse(text).body if isinstance(n, ast.FunctionDef) and n.decorator_list]
    kernels = [f for f in functions if any(a.arg == "SAVE" for a in f.args.args)]
    return {f.name: sum(products_of(call, levels) * times for call, times in calls(f.body, 1, levels)) for f in kernels}


def calls(body: list[ast.stmt], times: int, levels: int) -> Iterator[tuple[ast.Call, int]]:
    """Calls below the statements, with how often a walk over all levels makes each."""
    for statement in body:
        loop = isinstance(statement, ast.For) and ast.unparse(statement.target) == "level"
        factor = len(eval(ast.unparse(statement.iter), {"range": range, "LEVELS": levels})) if loop else 1
        if isinstance(statement, ast.For | ast.If):
            yield from calls([*statement.body, *statement.orelse], times * factor, levels)
        else:
            yield from ((n, times) for n in ast.walk(statement) if isinstance(n, ast.Call))


def products_of(call: ast.Call, levels: int) -> int:
    name = ast.unparse(call.func)
    if name == "_inverse":  # K = 128: without Newton's step
        return 2 * (levels - 1)
    if name == "_dot_fine":  # K = 128: what FINE names comes in one part
        return 1 + [ast.unparse(a) for a in call.args[4:]].count("True")
    if name in ("_sums", "_block_sums"):
        return 1 if ast.unparse(call.args[-1]) == "GATE_PARTS" else 3
    return int(name in ("_dot", "tl.dot"))


def test_no_helper_with_a_product_escapes_the_count() -> None:
    """A helper of the kernels that multiplies must be known to ``products_of`` and to ``explain``."""
    functions = [n for n in ast.parse(codegen.render(VARIANTS["gdn2_clipped"])).body if isinstance(n, ast.FunctionDef)]
    helpers = {f.name for f in functions if f.decorator_list and not any(a.arg == "SAVE" for a in f.args.args)}
    multiply = {f.name for f in functions if f.name in helpers and "tl.dot(" in ast.unparse(f)}
    assert multiply == {"_dot", "_dot_fine", "_sums", "_block_sums", "_inverse", "_joined"}
    assert not re.search(r"_joined\(", "".join(ast.unparse(f) for f in functions if f.name not in helpers))


def test_recomputation_is_counted() -> None:
    forward, backward = explain.sides(VARIANTS["kda"], explain.usual())
    assert forward.launches[0].again < forward.launches[0].total
    # W and U are formed again before the backward's scan, and the scan over the states runs again.
    assert backward.launches[0].again >= 2
    scan = next(row for row in backward.launches if row.kind == "scan")
    assert scan.again == scan.total
    assert sum(row.total for row in backward.launches) > count(backward.stages[-1].program)["products"]


def test_bytes_of_a_launch() -> None:
    """KDA's scan at C = 64, K = V = 128 in bfloat16 reads W, QL, AT, U, the C x C matrix and Gc, and writes o."""
    scan = next(row for row in explain.sides(VARIANTS["kda"], explain.usual())[0].launches if row.kind == "scan")
    tile = 64 * 128 * 2
    assert scan.read == 4 * tile + 64 * 64 * 2 + 128 * 4
    assert scan.written == tile
    assert scan.reread == 3 * tile + 64 * 64 * 2 + 128 * 4  # by the second block of 64 value columns


@pytest.mark.parametrize(("K", "size"), [(64, 4), (128, 2)])
def test_values_that_products_take_in_two_parts_count_as_wide(K: int, size: int) -> None:
    """The backward's forward scan writes the states before the chunks in bfloat16, and Vnew by the key size."""
    scan = next(r for r in explain.sides(VARIANTS["kda"], explain.usual(K, 96))[1].launches if r.kind == "scan")
    assert scan.written == 2 * K * 96 + size * 64 * 96


@pytest.mark.parametrize("side", ["forward", "backward"])
@pytest.mark.parametrize("name", VARIANTS)
def test_pictures(name: str, side: str, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--backward"] if side == "backward" else []
    plan = getattr(codegen.plans(VARIANTS[name]), side)
    boxes = picture.picture(plan).boxes
    items = [item for box in boxes for layer in box.layers for item in layer]

    root = ET.fromstring(said(capsys, "--variant", name, "--format", "svg", *flags))
    space = {"s": "http://www.w3.org/2000/svg"}
    texts = [t.text for t in root.iterfind(".//s:text", space)]
    assert [t for t in texts if ": one program a" in t] == [box.title for box in boxes]
    assert [box.title.split(":")[0] for box in boxes] == [k.name for k in plan.kernels]
    assert len(root.findall(".//s:g", space)) == len(items)
    width = float(root.get("width"))
    assert all(float(r.get("x")) >= 0 and float(r.get("x")) + float(r.get("width")) <= width for r in rects(root))

    chart = said(capsys, "--variant", name, "--format", "mermaid", *flags)
    assert chart.count("  subgraph ") == chart.count("  end\n") == len(plan.kernels)
    declared = set(re.findall(r"^ +(k\d+_\d+)[\[(]", chart, re.M))
    ends = re.findall(r"(k\d+_\d+) (?:-->|-\.->|-- carried -->) (k\d+_\d+)", chart)
    assert declared == {item.id for item in items}
    assert {i for pair in ends for i in pair} <= declared
    # Whatever a launch stores for a later one has a line between the two.
    crossing = sum(len(set(k.loads) & stored_before(plan, i)) for i, k in enumerate(plan.kernels))
    assert chart.count(" -.-> ") == crossing


def rects(root: ET.Element) -> list[ET.Element]:
    return [r for r in root.iter("{http://www.w3.org/2000/svg}rect") if r.get("x")]


def stored_before(plan: codegen.Plan, index: int) -> set[object]:
    earlier = plan.kernels[:index]
    return {n for k in earlier for n in k.stores} | {k.state[0] for k in earlier if k.state and k.keep_state}


# ---------------------------------------------------------------------------------------------------------------------
# verify


@pytest.mark.parametrize("name", VARIANTS)
def test_the_generic_loop_is_the_published_recurrence(name: str) -> None:
    streams, h0, _, _ = make(name, 2, 23, 2, 4, 12, 7, torch.float64, regime="mild", seed=5)
    inputs = dict(zip([stream for stream, _ in SIGNATURES[name]], streams, strict=True))
    o, ht = verify.token_loop(VARIANTS[name], inputs, h0, 0.3)
    want_o, want_ht = ORACLES[name](*streams, scale=0.3, initial_state=h0)
    torch.testing.assert_close(o, want_o, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(ht, want_ht, rtol=1e-12, atol=1e-12)


def test_the_generic_loop_where_the_decay_underflows() -> None:
    """b = d / alpha is never divided, so -1e4 is an ordinary log-decay."""
    streams, h0, _, _ = make("dplr_absorbed", 1, 23, 1, 1, 12, 7, torch.float64, regime="spikes", seed=6)
    inputs = dict(zip([stream for stream, _ in SIGNATURES["dplr_absorbed"]], streams, strict=True))
    o, _ = verify.token_loop(VARIANTS["dplr_absorbed"], inputs, h0, 0.3)
    assert o.isfinite().all()
    torch.testing.assert_close(o, ORACLES["dplr_absorbed"](*streams, scale=0.3, initial_state=h0)[0])


def test_verify_passes_and_prints_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["verify", "--variant", "gla", "--device", "cpu", "--dtype", "float32", "bfloat16"]) == 0
    text = capsys.readouterr().out
    rows = [line.split()[0] for line in text.splitlines() if re.match(r"\S+ +\d", line)]
    assert rows == 2 * ["o", "ht", "dq", "dk", "dv", "dg", "dh0"]
    assert text.count("mild    strong    spikes      weak     bound") == 2
    assert text.endswith("within the bounds\n")


def test_verify_takes_a_record_from_a_file(mine: str, cache: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["verify", "--variant", mine, "--dtype", "float32", "--device", "cpu"]) == 0
    assert "dbeta" in capsys.readouterr().out


RENAMED = """
import dplrgen
from dplrgen.ir import exp, gate, key, safe_div, norm, value

r, c, x, lam, e = key("r"), key("c"), value("x"), gate("lam", "K"), gate("e", "K")
mine = dplrgen.Variant(
    name="renamed", inputs=(x, r, lam, c, e), decay=exp(lam) * e, a=c, b=0.5 * c, k=c, v=x, q=safe_div(r, norm(r))
)
"""


def test_verify_knows_inputs_by_what_they_are(here: Path, cache: None, capsys: pytest.CaptureFixture[str]) -> None:
    """No input is q or v; one gate of the decay is a logarithm and one a factor."""
    (here / "renamed.py").write_text(RENAMED, encoding="utf-8")
    words = ["verify", "--variant", "renamed.py:mine", "--dtype", "float32", "--device", "cpu"]
    assert cli.main(words) == 0, capsys.readouterr().out


def test_a_record_of_ones_own_does_not_replace_an_operator_of_the_package(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Path(dplrgen.generated.__path__[0])
    (here / "kda.py").write_text(RENAMED.replace('"renamed"', '"kda"'), encoding="utf-8")
    before = tree(folder)
    assert cli.main(["emit", "--variant", "kda.py:mine", "--out", str(folder)]) == 2
    assert "write kda elsewhere" in capsys.readouterr().err
    assert tree(folder) == before


def one_wrong_row(o: torch.Tensor) -> torch.Tensor:
    return torch.cat([o[:, :-1], 1.001 * o[:, -1:]], 1)


@pytest.mark.parametrize("decay", ["exp(-x)", "exp(x * y)", "exp(-sigmoid(x))"])
def test_verify_draws_gates_by_which_states_shrink(
    decay: str, here: Path, cache: None, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "turned.py").write_text(
        "import dplrgen\nfrom dplrgen.ir import exp, gate, key, sigmoid, value\n"
        'q, k, v, x, y = key("q"), key("k"), value("v"), gate("x"), gate("y")\n'
        f'mine = dplrgen.Variant(name="mine", inputs=(q, k, v, x, y), decay={decay}, a=k, b=0.5 * k, k=k, v=v)\n'
    )
    words = ["verify", "--variant", "turned.py:mine", "--dtype", "float32", "--device", "cpu"]
    assert cli.main(words) == 0, capsys.readouterr().out


@pytest.mark.parametrize("fault", [one_wrong_row, lambda o: o * 1.001, lambda o: o * torch.nan])
def test_verify_fails_beyond_the_bounds(
    fault, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right = verify.operator(VARIANTS["gla"])

    def wrong(*streams: torch.Tensor, **options: object) -> tuple[torch.Tensor, torch.Tensor | None]:
        o, ht = right(*streams, **options)
        return fault(o), ht

    monkeypatch.setattr(verify, "operator", lambda variant: wrong)
    assert cli.main(["verify", "--variant", "gla", "--device", "cpu", "--dtype", "float32"]) == 1
    text = capsys.readouterr().out
    assert text.endswith("BEYOND THE BOUNDS\n")
    assert re.search(r"^o .*BEYOND: ", text, re.M)


# ---------------------------------------------------------------------------------------------------------------------
# doctor

H200 = ("NVIDIA H200", (9, 0))
PTXAS = "known fault: Triton before 3.9"


@pytest.mark.parametrize(
    ("here", "lines"),
    [
        (
            ("3.12.4", "2.11.0+cu130", "3.6.0", (H200,)),
            ["tested on NVIDIA H200", "known fault: Triton 3.4 to 3.7.0", PTXAS],
        ),
        (("3.11.9", "2.13.0+cpu", "3.7.1", ()), ["tested on CPU"]),
        (("3.11.9", "2.13.0", "3.7.1", (H200,)), ["tested on CPU", "untried GPU for this set: NVIDIA H200", PTXAS]),
        (("3.11.9", "2.13.0+cpu", "3.9.0", ()), ["tested on CPU", "known fault: Triton 3.9.0"]),
        (("3.13.0", "2.13.0+cpu", "3.9.1", ()), ["untried together"]),
        (("3.12.0", "2.12.0", "3.7.0", (H200,)), ["untried together", "known fault: Triton 3.4 to 3.7.0", PTXAS]),
        (("3.12.0", "2.12.0", "3.7.0", (("NVIDIA A100", (8, 0)),)), ["untried together"]),
        (("3.10.0", "2.9.1", "3.5", ()), ["untried together", "too old: torch 2.9.1", "too old: triton 3.5"]),
        (("3.11.0", "2.13.0", None, ()), ["untried together"]),
    ],
)
def test_doctor_judges_versions(here: tuple, lines: list[str]) -> None:
    found = list(doctor.judgement(doctor.Installed(*here)))
    assert len(found) == len(lines)
    assert all(line.startswith(start) for line, start in zip(found, lines, strict=True))


def test_doctor_tries_the_back_ends(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(doctor, "_in_interpreter", lambda here: doctor.Finding("interpreter", "absent", "not asked"))
    monkeypatch.setattr(doctor, "_gpus", lambda: ())
    assert cli.main(["doctor"]) == 0
    text = capsys.readouterr().out
    assert re.search(r"^torch +\d", text, re.M)
    assert re.search(r"^PyTorch on the CPU +works +kda", text, re.M)
    assert re.search(r"^Triton on CUDA +absent", text, re.M)
    assert all(t.on in text for t in doctor.TESTED)


def test_doctor_runs_the_interpreter() -> None:
    pytest.importorskip("triton")
    finding = doctor._in_interpreter(doctor.installed())
    assert finding.state == "works", finding.detail


def test_doctor_says_what_fails(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def broken(backend: str, dtype: str) -> str:
        raise RuntimeError("no such\nkernel")

    monkeypatch.setattr(doctor, "probe", broken)
    monkeypatch.setattr(doctor, "_in_interpreter", lambda here: doctor.Finding("interpreter", "absent", "not asked"))
    assert cli.main(["doctor"]) == 1
    assert re.search(r"^PyTorch on the CPU +fails +RuntimeError: no such kernel$", capsys.readouterr().out, re.M)


def test_doctor_where_torch_is_missing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(doctor, "_version", lambda package: None)
    assert cli.main(["doctor"]) == 0
    text = capsys.readouterr().out
    assert "torch    not installed" in text
    assert text.count("absent") == 3
