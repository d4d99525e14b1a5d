# make demo   emit KDA into an empty folder, compile the file whole, compare with a float64 token loop
# make test   what CI runs: lint, freshness of generated/, the tests
# make lint   ruff and mypy
# make emit   write generated/ anew
# make aot    compile every kernel ahead of time, for every target, into the checked-in table

PYTHON ?= python3
VENV   ?= .venv
TORCH  ?= torch==2.13.0
JOBS   ?= 2
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready

.PHONY: demo test lint emit aot clean

demo: $(READY)
	$(BIN)/python examples/demo.py

# One thread a worker: the workers already fill the cores.
test: lint
	$(BIN)/dplrgen emit --all --check
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) $(PYTEST_ARGS)

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict dplrgen

emit: $(READY)
	$(BIN)/dplrgen emit --all

aot: $(READY)
	$(BIN)/python benchmarks/aot.py --write
	$(BIN)/python benchmarks/aot.py --targets sm_90 --dtypes float16 --write

clean:
	rm -rf $(VENV) build *.egg-info

# torch goes in first and alone, at the version that the tests are held to, and is pinned again beside the package:
# the package asks for `torch>=2.11`, and a resolver left free would fetch a newer one, gigabytes of CUDA included.
# Where pip offers a CPU build, a local version such as 2.13.0+cpu, it satisfies the pin and is preferred.
$(READY): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet "$(TORCH)"
	$(BIN)/python -m pip install --quiet "$(TORCH)" --editable ".[dev]"
	touch $@
