# Everything a user runs; `make help` lists it. Extra arguments: make reproduce ARGS="conf/smoke.yaml seed=3"

VENV := .venv
BIN := $(VENV)/bin
PYTHON ?= $(shell command -v python3.11 || command -v python3.12 || command -v python3)
# Where PyTorch serves its CPU builds; used only if the plain install does not find the pinned one.
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
PIP := $(BIN)/python -m pip --disable-pip-version-check
TORCH := $(shell grep '^torch==' requirements/cpu.txt)
ARGS ?=
# The Docker images' base, by digest; looked up once when a docker target runs.
BASE_DIGEST ?= $(shell docker buildx imagetools inspect python:3.11-slim-bookworm --format '{{.Manifest.Digest}}')

.DEFAULT_GOAL := help
.PHONY: help setup reproduce report test check bench study chaos fuzz soak docker-digest docker-cpu docker-gpu docker-lint clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(VENV)/.installed ## install everything into .venv (about 4 GB, 3 minutes); does nothing when up to date

$(VENV)/.installed: requirements/cpu.txt requirements/dev.txt pyproject.toml
	@$(PYTHON) -c 'import sys; assert (3, 11) <= sys.version_info < (3, 13)' 2>/dev/null || \
		{ echo "setup: needs Python 3.11 or 3.12, found $$($(PYTHON) --version 2>&1); install one or give PYTHON=..." >&2; exit 2; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "setup: installing about 4 GB into $(VENV), which takes a few minutes"
	@$(PIP) install --quiet --no-deps '$(TORCH)' 2>/dev/null || \
		$(PIP) install --quiet --no-deps --extra-index-url $(TORCH_INDEX) '$(TORCH)'
	@$(PIP) install --quiet --no-deps -r requirements/cpu.txt
	@$(PIP) install --quiet --no-deps -r requirements/dev.txt
	@$(PIP) install --quiet --no-deps --no-build-isolation --editable .
	@touch $@
	@echo "setup: done"

reproduce: setup ## re-run the paper in miniature: every arm, figures, report (20 to 30 minutes on 2 cores)
	@$(BIN)/trm-repro reproduce $(ARGS)

report: setup ## draw the figures and write the report again, from MLflow
	@$(BIN)/trm-repro report $(ARGS)

test: setup ## run the tests: the quick ones on every core, then those with engines, servers and browsers
ifeq ($(ARGS),)
	@$(BIN)/python -m pytest --numprocesses auto --dist loadfile tests/unit
	@$(BIN)/python -m pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder tests/integration
	@$(BIN)/python -m pytest tests/gpu
else
	@$(BIN)/python -m pytest $(ARGS)
endif

check: setup ## lint, types, import rules, known vulnerabilities of the locked packages
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports
	@$(BIN)/hadolint Dockerfile
	@$(BIN)/python -m tests.dependency_audit

bench: setup ## run every script of benchmarks/ into one table (ARGS="--only NAME --quick"); goes on where it was
	@$(BIN)/python -m benchmarks $(ARGS)

study: setup ## run the study behind docs/miniature.md (hours; goes on where it was)
	@$(BIN)/trm-repro study $(ARGS)

chaos: setup ## kill -9 a run 50 times at random moments and compare its end with an undisturbed one
	@$(BIN)/python -m tests.chaos $(ARGS)

fuzz: $(VENV)/fuzz ## fuzz everything that reads files for some minutes; ARGS="--seconds 3600"
	@PYTHONPATH=$(VENV)/fuzz $(BIN)/python -m tests.fuzz $(ARGS)

# Not among the packages of `make setup`: its builds are for one Python each. Without it hypothesis draws the inputs.
$(VENV)/fuzz: requirements/fuzz.txt | setup
	@$(PIP) install --quiet --no-deps --upgrade --target $@ -r $< || \
		{ echo "fuzz: no atheris for this Python here; hypothesis draws the inputs" >&2; mkdir -p $@; }
	@touch $@

soak: setup ## run 2,000 short steps and print the slopes of memory and file handles
	@$(BIN)/python -m tests.soak $(ARGS)

docker-digest: ## print the digest of the Docker images' base, for compose.yaml
	@echo $(BASE_DIGEST)

docker-cpu: ## build the image that runs the miniature
	docker build --target cpu --build-arg BASE_DIGEST=$(BASE_DIGEST) --tag trm-repro-cpu .

docker-gpu: ## build the image that runs the paper's setting
	docker build --target gpu --build-arg BASE_DIGEST=$(BASE_DIGEST) --tag trm-repro-gpu .

docker-lint: setup ## lint the Dockerfile
	@$(BIN)/hadolint Dockerfile

clean: ## delete the environment and caches; runs/ stays
	@rm -rf $(VENV) *.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
