"""What the scripts of this folder share: the checkout's own modules, workers that may crash, recorded launches.

The scripts run from a bare checkout, the package not installed: `use_checkout()` puts the package, the tests' helpers
and this folder on the path and makes `dplrgen.generated` mean `generated/`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import importlib.util
import json
import os
import re
import select
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent

Json = dict[str, Any]


def use_checkout() -> None:
    """Import the package, the tests' helpers and this folder from the checkout, whatever is installed."""
    for folder in (ROOT, ROOT / "tests", ROOT / "benchmarks"):
        if str(folder) not in sys.path:
            sys.path.insert(0, str(folder))
    if "dplrgen.generated" in sys.modules:
        return
    folder = ROOT / "generated"
    spec = importlib.util.spec_from_file_location(
        "dplrgen.generated", folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    assert spec is not None
    assert spec.loader is not None
    package = importlib.util.module_from_spec(spec)
    sys.modules["dplrgen.generated"] = package
    spec.loader.exec_module(package)


def generated(name: str) -> ModuleType:
    """The generated module of a variant."""
    use_checkout()
    return importlib.import_module(f"dplrgen.generated.{name}")


def versions(device: str) -> Json:
    """What the figures were taken with."""
    import torch

    found: Json = {"torch": torch.__version__, "device": device}
    with contextlib.suppress(ImportError):
        import triton

        found["triton"] = triton.__version__
    if device == "cuda":
        found["device"] = torch.cuda.get_device_name()
    return found


def table(rows: Sequence[Sequence[object]], head: Sequence[str]) -> str:
    """Columns padded to their widest entry, numbers to the right."""
    text = [[f"{x:.2e}" if isinstance(x, float) else str(x) for x in row] for row in rows]
    widths = [max(len(row[i]) for row in [list(head), *text]) for i in range(len(head))]
    lines = []
    for row in (head, *text):
        first, *rest = (x.rjust(w) if i else x.ljust(w) for i, (x, w) in enumerate(zip(row, widths, strict=True)))
        lines.append("  ".join([first, *rest]).rstrip())
    return "\n".join(lines)


# ---------------------------------------------------------------------------------------------------------------------
# Workers: a process each, fed one JSON item a line, answering one JSON row a line. A crash costs the item at hand.

BROKEN = 3
"""How a worker leaves whose device no longer works."""


def serve(handle: Callable[[Json], Json]) -> None:
    """A worker's loop: every item of stdin through `handle`, the row or the error to stdout; prints go to stderr."""
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    for line in sys.stdin:
        try:
            answer: Json = {"row": handle(json.loads(line))}
        except Exception as error:
            answer = {"error": describe(error)}
        broken = "error" in answer and not _device_works()
        print(json.dumps(answer), file=out, flush=True)
        if broken:
            os._exit(BROKEN)


def median_ms(run: Callable[[], object], device: str, rep: float = 100.0) -> float:
    """Median milliseconds of a call, the cache cleared before each; on the CPU a few calls by the clock."""
    if device == "cuda":
        from triton.testing import do_bench

        return float(do_bench(run, warmup=rep / 4, rep=rep, return_mode="median"))
    times = []
    for _ in range(3):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return sorted(times)[1] * 1e3


def describe(error: BaseException) -> str:
    """Kind and text of an error, and the innermost lines of its traceback."""
    text = f"{type(error).__name__}: {' '.join(str(error).split())[:600]}"
    frames = traceback.extract_tb(error.__traceback__)[-3:]
    return text + "".join(f" | {Path(f.filename).name}:{f.lineno} {f.line}" for f in frames)


def _device_works() -> bool:
    """False once the device's context is lost, as it is after an illegal access."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return True
    try:
        torch.cuda.synchronize()
        torch.ones(1, device="cuda").sum().item()
    except Exception:
        return False
    return True


class Worker:
    """One worker process; `ask` raises if it dies or takes too long, and the next `ask` starts another."""

    def __init__(self, command: Sequence[str], environment: Json | None = None) -> None:
        self.command, self.environment = list(command), {**os.environ, **(environment or {})}
        self.process: subprocess.Popen[bytes] | None = None
        self.errors: Any = None
        self.rest = b""

    def ask(self, item: Json, seconds: float) -> Json:
        if self.process is None:
            self._start()
        process = self.process
        assert process is not None
        assert process.stdin is not None
        try:
            process.stdin.write(json.dumps(item).encode() + b"\n")
            process.stdin.flush()
            answer = self._line(seconds)
        except BrokenPipeError:
            answer = None
        if answer is None:
            code = self._end()
            raise RuntimeError(f"the worker died ({code}): {self._last_words()}")
        row: Json = json.loads(answer)
        return row

    def _start(self) -> None:
        self.errors = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the process
        self.process = subprocess.Popen(
            self.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.errors, env=self.environment
        )
        self.rest = b""

    def _line(self, seconds: float) -> bytes | None:
        """The next line; None at the end of the output, an error after too long."""
        assert self.process is not None
        assert self.process.stdout is not None
        pipe, until = self.process.stdout.fileno(), time.monotonic() + seconds
        while b"\n" not in self.rest:
            ready, _, _ = select.select([pipe], [], [], max(0.0, until - time.monotonic()))
            if not ready:
                self._end()
                raise TimeoutError(f"no answer within {seconds:.0f} s: {self._last_words()}")
            piece = os.read(pipe, 1 << 16)
            if not piece:
                return None
            self.rest += piece
        line, _, self.rest = self.rest.partition(b"\n")
        return line

    def _end(self) -> int | None:
        process, self.process = self.process, None
        if process is None:
            return None
        with contextlib.suppress(OSError):
            process.stdin.close()  # type: ignore[union-attr]
        try:
            code = process.wait(2.0)
        except subprocess.TimeoutExpired:
            process.kill()
            code = process.wait()
        process.stdout.close()  # type: ignore[union-attr]
        return code

    def _last_words(self) -> str:
        self.errors.seek(0)
        text = self.errors.read().decode(errors="replace")
        self.errors.close()
        return " | ".join(text.splitlines()[-4:])[-800:]

    def close(self) -> None:
        if self._end() is not None:
            self.errors.close()


def run_pool(
    command: Sequence[str],
    items: Sequence[Json],
    workers: int,
    on_answer: Callable[[Json, Json], None],
    *,
    until: float = float("inf"),
    item_seconds: float = 300.0,
    grace: float = 60.0,
    environment: Json | None = None,
) -> list[Json]:
    """Every item through one of the workers, in order of asking; `on_answer(item, {"row": ..} or {"error": ..})`.

    No item is begun after `until` (as time.monotonic has it), and those under way then have `grace` seconds more.
    Returns the items that were not begun.
    """
    queue, lock = iter(items), threading.Lock()
    left: list[Json] = []

    def next_item() -> Json | None:
        with lock:
            if time.monotonic() >= until:
                left.extend(queue)
            return next(queue, None)

    def work() -> None:
        worker = Worker(command, environment)
        while (item := next_item()) is not None:
            limit = min(item_seconds, until + grace - time.monotonic())
            try:
                answer = worker.ask(item, limit)
            except (RuntimeError, OSError, ValueError) as error:  # a TimeoutError is an OSError
                answer = {"error": describe(error)}
            with lock:
                on_answer(item, answer)
        worker.close()

    threads = [threading.Thread(target=work) for _ in range(max(1, min(workers, len(items))))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return left


# ---------------------------------------------------------------------------------------------------------------------
# Launches of a generated module, recorded and replayed one by one


@dataclasses.dataclass
class Launch:
    """One kernel launch as the module asked for it."""

    kernel: Any
    programs: int
    args: tuple[Any, ...]
    options: Json

    @property
    def name(self) -> str:
        return str(getattr(self.kernel, "__name__", None) or self.kernel.fn.__name__)

    def __call__(self) -> None:
        if self.programs > 0:
            self.kernel[(self.programs,)](*self.args, **self.options)

    def named(self) -> Json:
        return dict(zip(self.kernel.arg_names, self.args, strict=False))

    def outputs(self) -> list[Any]:
        return [x for key, x in self.named().items() if key.endswith("_out") and x.numel() > 0]

    def bytes(self) -> int:
        """Bytes of the tensors that it was given, each counted once."""
        tensors = {x.data_ptr(): x.numel() * x.element_size() for x in self.args if hasattr(x, "data_ptr")}
        return sum(tensors.values())


@contextlib.contextmanager
def recorded(module: ModuleType, launch: bool) -> Iterator[list[Launch]]:
    """The launches that the module makes inside the block, made or only noted."""
    launches: list[Launch] = []
    original = module._launch

    def note(kernel: Any, programs: int, *args: Any, **options: Any) -> None:
        launches.append(Launch(kernel, programs, args, options))
        if launch:
            original(kernel, programs, *args, **options)

    module._launch = note
    try:
        yield launches
    finally:
        module._launch = original


def launches(
    module: ModuleType,
    streams: Sequence[Any],
    do: Any,
    scale: float,
    *,
    launch: bool,
    save: bool = True,
    h0: Any = None,
    dht: Any = None,
    final: bool = False,
) -> list[Launch]:
    """The launches of one forward and, where it saves, of its backward, for all gradients; made or only noted."""
    plain = [x.detach() for x in streams]
    needs = (1 << len(plain) + (h0 is not None)) - 1
    with recorded(module, launch) as found:
        results = module._forward_triton(*plain, h0, None, None, scale, final, save)
        if save:
            module._backward_triton(do, dht, *plain, h0, None, None, *results[2:], scale, needs)
    return found


FIELDS = ("BK", "BV", "warps", "stages", "registers")
"""What the numbers of an entry of a module's table `_CONFIGS` are."""

OPTIONS = ("BK", "BV", "num_warps", "num_stages", "maxnreg")
"""The same as a launch has them."""


def table_key(kernel: str, keys: Sequence[str]) -> str:
    """The entry of the table of configurations that a kernel's name ends in."""
    found = [key for key in keys if kernel.endswith(f"_{key}")]
    if not found:
        raise KeyError(f"no configuration for {kernel} among {', '.join(keys)}")
    return max(found, key=len)


def kernels_of(module: ModuleType) -> list[str]:
    """Names of the kernels that are launched, in the order of the file."""
    named = [n for n in vars(module) if re.match(r"_(forward|backward)_", n)]
    return [n for n in named if hasattr(getattr(module, n), "arg_names")]
