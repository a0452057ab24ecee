# Everything runs in a virtual environment that the first target makes.
#   make demo                       see it work
#   make test                       run the tests
#   make test PIP_ARGS="..."        extra arguments for every pip install (a torch build of your choice, a mirror)
PYTHON ?= python3
VENV ?= .venv
PIP_ARGS ?=
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help install demo test test-slow lint format bench reproduction clean

help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt $(PIP_ARGS) -e ".[dev]"
	@touch $@

install: $(INSTALLED)  ## the virtual environment with igeood and its tools

demo: install  ## the pipeline on embedded data
	$(BIN)/igeood demo

test: install  ## every test but the slow ones
	$(BIN)/python -m pytest -m "not slow"

test-slow: install  ## the slow tests
	$(BIN)/python -m pytest -m slow

lint: install  ## ruff, mypy, and the layers
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: install  ## let ruff rewrite what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: install  ## speed, side by side
	$(BIN)/python benchmarks/black_box.py

# What the reproduction runs on; iSUN is the paper's validation set.
NETWORKS ?= $(wildcard $(IGEOOD_DATA)/weights/*.safetensors)
VALIDATION ?= idx:/usr/share/datasets/fashion-mnist
RESULTS ?= build/reproduction
SETS := tiny-imagenet chars74k gaussian
PAPER = $(BIN)/igeood paper --results $(RESULTS) --out docs/reproduction
BENCH = $(BIN)/igeood bench $(addprefix --network ,$(NETWORKS)) $(addprefix --ood ,$(SETS)) --out $(RESULTS)

reproduction: install  ## docs/reproduction.md from $$IGEOOD_DATA: half an hour, minutes the second time
	$(BENCH) --validation $(VALIDATION)
	$(BENCH) --setting black-box --validation none $(addprefix --validation ,$(SETS))
	$(PAPER) black-box --validation none > $(RESULTS)/defaults.md
	$(PAPER) all --validation $(VALIDATION) $(addprefix --network ,$(NETWORKS)) > $(RESULTS)/tables.md
	{ cat docs/reproduction/notes.md; echo "## Black box at default temperatures"; echo; cat $(RESULTS)/defaults.md; \
	  echo "## Each table and figure of the paper"; echo; cat $(RESULTS)/tables.md; } | sed 's#](docs/#](#' > $(RESULTS)/all.md
	mv $(RESULTS)/all.md docs/reproduction.md

clean:  ## remove everything that make made
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
	find . -name '*.egg-info' -type d -prune -exec rm -rf {} +
