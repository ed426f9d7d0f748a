# Two commands do everything on a machine with Python >= 3.11, pip and make:
#   make train   creates .venv, installs, and trains a first run on a local cluster; two learners are killed on the way
#   make test    creates .venv, installs, lints, type-checks, and runs the tests
# `make quick` runs the tests that take seconds, for the inner loop; `make soak` those that take hours.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

# Where this is set every process compiles all of torch that it imports anew, which takes longer than most tests.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: train quick test test-extras page docs wheel lint types soak bench clean

train: $(INSTALLED)
	$(BIN)/atoll train recipes/first.toml --chaos recipes/two_kills.toml --twin

QUICK := tests/test_tidy.py tests/protocol tests/transcripts tests/unit/tensors tests/unit/codecs
quick: lint
	$(BIN)/python -m pytest -n 2 --dist loadgroup -m "not soak and not extras" $(QUICK)

# Three workers on two cores: a live test waits for processes half of its time. The kernels are built once, beside the type
# checker: in a new checkout every process that merges would build them for itself.
test: lint
	$(BIN)/python tests/helpers/built_kernels.py & built=$$!; $(MAKE) types && wait $$built
	$(BIN)/python -m pytest -n 3 --dist loadgroup -m "not soak and not extras"

# Hugging Face and Lightning beside what is there: the constraint keeps torch as it is.
test-extras: $(INSTALLED)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[test,extras,eval,release,tensorboard,wandb,mlflow,page,ray,titan,jobset]"
	$(BIN)/python -m pytest tests/live/test_examples.py
	$(BIN)/python -m pytest -m extras tests/unit tests/extras

# The page of `atoll watch`, from web/ into the package. Only who changes web/ needs node: what is built is part of the repository.
page:
	cd web && npm ci --no-audit --no-fund && npm run types && npm run build

# The docs site, in site/: strict, so that a dead link or a page outside the navigation fails; then what holds of the built pages.
docs: $(INSTALLED)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[test,docs]"
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict
	$(BIN)/python -m pytest tests/docs

# A source archive, and a wheel built from that archive alone: what it lacks, the wheel lacks too.
wheel: $(INSTALLED)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[test,release]"
	rm -rf dist
	$(BIN)/python -m build --quiet

lint: $(INSTALLED)
	$(BIN)/ruff check src tests bench docs

types: $(INSTALLED)
	$(BIN)/mypy

soak: $(INSTALLED)
	$(BIN)/python bench/histories.py --count 10000
	$(BIN)/python bench/kills.py --minutes 60
	$(BIN)/python bench/hostile_messages.py --messages 1000000
	ATOLL_EXAMPLES=anew $(BIN)/python -m pytest -n 2 --dist loadgroup -m "not extras"

# A bench whose target is missed says so and returns 1; the others run all the same.
bench: $(INSTALLED)
	-$(BIN)/python bench/codecs.py
	-$(BIN)/python bench/events.py
	-$(BIN)/python bench/step_overhead.py
	-$(BIN)/python bench/sight.py
	-$(BIN)/python bench/syncer_memory.py
	-$(BIN)/python bench/wire.py
	-$(BIN)/python bench/syncer_load.py
	-$(BIN)/python bench/simulators.py
	-$(BIN)/python bench/plan.py
	-$(BIN)/python bench/synthetic_tape.py
	-$(BIN)/python bench/agreement.py

# torch comes by a pinned constraint, so that a CPU machine does not pull gigabytes of CUDA packages. Python compiles what it
# imports; compiling all of torch beforehand would take longer than the rest of the installation.
$(INSTALLED): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt --editable ".[test]"
	touch $(INSTALLED)

clean:
	rm -rf $(VENV) runs site .mypy_cache .ruff_cache build dist
