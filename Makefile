# make check   ruff, mypy and the fast tests, in three minutes: while working
# make test    all tests, but for those that take minutes each: make test-long
# make test-faults   faults at every call of a save, every state after a loss of power, damage to files (half an hour)
# make lint    ruff and mypy          make demo    the demonstration
# make docs    the site of docs/, into outputs/site, and its tests; warnings are errors
# make bench   every benchmark        make clean   remove what these made
# make bench-report   the benchmarks of benchmarks/RESULTS.md, and that page anew (50 minutes on a quiet machine)
# make matrix  the wheel with pairs of Python and torch, as far as they are here, and the tests of Accelerate, Lightning
#              and transformers with their oldest versions; the tables of docs/reference/versions.md
# make release DRY_RUN=1   build and check what would be released; without DRY_RUN, tag it as well
# make bench-cuda     tests and benchmarks that need a GPU, with PYTHON as it is: no network is needed (eight minutes)
#
# Each first installs what it needs into .venv, with the versions of constraints.txt. Settings:
#   PYTHON=python3.12           the Python that .venv is made with (3.11 or newer)
#   PIP_ARGS="..."              more arguments for pip, say another index
#   ARGS="-k resume -x"         more arguments for pytest, bench-report or bench-cuda (--only save, --from-json)
#   TEST_SEED=93af1c0e2b11      the sample of cases that pytest's header shows, instead of one by the commit
#   TEST_TIMEOUT_SCALE=3        three times the time limit that ends what hangs, 20 minutes
#   TORCH=2.15.0                another version of torch, in an environment of its own (.venv-torch-2.15.0)

PYTHON ?= python3
TORCH ?=
VENV := .venv$(if $(TORCH),-torch-$(TORCH))
BIN := $(VENV)/bin

# The extras of pyproject.toml that a target needs. $(VENV)/.test is made once `make test` has installed its own.
EXTRAS_demo := examples
EXTRAS_test := dev,examples,hf,cli,objects,lightning-s3,bench
EXTRAS_docs := docs,lightning,hf,cli

.PHONY: help check test test-long test-faults lint docs demo bench bench-report bench-cuda matrix release clean

help:
	@sed -n '/^$$/q;s/^# \{0,1\}//p' Makefile

# Hundreds of processes import the package and the tests, and Python would compile both in each of them.
unexport PYTHONDONTWRITEBYTECODE

# No ranks, no frameworks, and none of the files that start scripts.
ROOMS := $(addprefix core/,format tensors state media storage planning saving loading runs) tiers tools
SCRIPTS := core/saving/test_async_save core/saving/test_when_busy core/tensors/test_torch_canary
FAST := $(ROOMS:%=tests/%) $(SCRIPTS:%=--ignore=tests/%.py) tests/project/test_architecture.py tests/project/test_tests.py

check: lint
	$(BIN)/python -m pytest -n 2 --dist loadfile -m "not long and not ranks" $(FAST) $(ARGS)

# Three files of tests at a time, on two cores too, since ranks wait for each other and for the disk. A fourth worker
# would import every framework once more.
test: $(VENV)/.test
	$(BIN)/python -m pytest -n 3 --dist loadfile --ignore=tests/project/test_site.py $(ARGS)

test-long: $(VENV)/.test
	$(BIN)/python -m pytest -m long $(ARGS)

test-faults: $(VENV)/.test
	$(BIN)/python -m tests.faults $(ARGS)
	$(BIN)/python -m tests.faults flips

lint: $(VENV)/.test
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

# docs/llms.txt is the list of its pages, for whoever reads them as text.
docs: $(VENV)/.docs
	@$(BIN)/python docs/llms.py
	@$(BIN)/python -m pytest --quiet --no-header tests/project/test_site.py $(ARGS)
	@echo "outputs/site/index.html"

demo: $(VENV)/.demo
	@$(BIN)/python examples/demo.py

# A file of benchmarks/ is one benchmark, but for those that start with an underscore.
bench: $(VENV)/.test
	@for file in benchmarks/[!_]*.py; do \
		name=$$(basename "$$file" .py); echo "== $$name"; $(BIN)/python -m benchmarks "$$name" || exit 1; \
	done

bench-report: $(VENV)/.test
	@$(BIN)/python -m benchmarks.report $(ARGS)

# Without .venv: compute nodes have no network, and their Python has the torch that fits their GPU.
bench-cuda:
	@$(PYTHON) -m pytest -q tests/system/test_cuda.py; ended=$$?; $(PYTHON) -m benchmarks cuda $(ARGS) && exit $$ended

matrix: $(VENV)/.test
	@$(BIN)/python tools/matrix.py $(ARGS)

release: $(VENV)/.test
	@$(BIN)/python -m tools.release $(if $(DRY_RUN),--dry-run) $(ARGS)

clean:
	rm -rf .venv .venv-torch-* outputs build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/.%: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "Python 3.11 or newer is needed: make PYTHON=python3.12 ..." >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing into $(VENV) what \`make $*\` needs: dcp-plugin[$(EXTRAS_$*)]."
	@echo "torch alone has some hundred megabytes, so the first time takes minutes. pip says where it is:"
	@sed '$(if $(TORCH),s/^torch==.*/torch==$(TORCH)/)' constraints.txt > $(VENV)/constraints.txt
	@$(BIN)/python -m pip install --disable-pip-version-check $(PIP_ARGS) \
		-c $(VENV)/constraints.txt -e ".[$(EXTRAS_$*)]"
	@touch $@
