# Two commands matter: `make train` and `make test`. Both set up what is missing.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
TOOLS  := $(VENV)/.ready-tools
AT_ONCE := -n 3 --dist loadfile --no-loadscope-reorder

unexport PYTHONDONTWRITEBYTECODE # each process would compile all modules anew, a second of each

.DEFAULT_GOAL := help
.PHONY: help setup train test test-fast soak check bench accuracy docs site clean

help:            ## show this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*##/\t/' | expand -t 12

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch==2.13.0
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[hf,ui]'
	@touch $(READY)

$(TOOLS): $(READY)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[hf,qlora,ui,trackers,dev,peers]'
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-deps --upgrade --target $(VENV)/fp8 torchao
	@touch $(TOOLS)

setup: $(TOOLS)  ## make .venv and install what is pinned in constraints.txt, with all that tests and benchmarks need

train: $(READY)  ## train the example on Python's own source code: plan, falling loss, receipts; and its wall time
	@started=$$(date +%s); $(BIN)/shardwise train examples/stdlib.toml && \
	echo "make train: $$(($$(date +%s) - started)) s after installation"

test: $(TOOLS)   ## run the tests of this commit (most of all; slow ones by turns), and show the 20 slowest
	$(BIN)/python -m pytest -q $(AT_ONCE) --durations=20

test-fast: $(TOOLS) ## what to run while working: no long test (tests/fast.py), no ranks but one case of each strategy
	$(BIN)/python -m pytest -q $(AT_ONCE) -n 2 --fast tests/unit tests/golden tests/world/test_gradients.py

soak: $(TOOLS)   ## what takes too long for each change, then 500 kills -9 (SOAK_KILLS, or SOAK_MINUTES=60): every resume, bit by bit
	SHARDWISE_TESTS_TURN=all $(BIN)/python -m pytest -q -m "soak or not soak"
	$(BIN)/python -m tests.faults.soak

check: $(TOOLS)  ## lint, format, types, sizes and layers
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/unit/test_house.py

bench: $(TOOLS)  ## step time against a plain hand-written loop, paired in one run; the planner's own speed
	$(BIN)/shardwise bench step examples/stdlib.toml --output benchmarks
	$(BIN)/python benchmarks/planner_speed.py --output benchmarks

accuracy: $(TOOLS)  ## predictions against published and own measurements: all tables and plots again
	$(BIN)/python benchmarks/accuracy/run.py

docs: $(TOOLS)   ## write docs/config.md from the schema of the config file, docs/lint-rules.md from the rules
	$(BIN)/python -m tests.golden.test_config_page --write
	$(BIN)/python -m tests.golden.test_lint_rules --write

site: $(TOOLS)   ## the planner and the docs as static pages, build/site; needs npm and node, and what it downloads is pinned
	$(BIN)/python -m shardwise.web.build_site -o build/site

clean:           ## remove .venv and caches; runs are kept
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache
