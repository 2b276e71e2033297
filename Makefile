# Everything a person does with a fresh clone. Each target sets up what it needs and says what it runs.
VENV ?= .venv
PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := $(VENV)/bin
STAMP := $(VENV)/.flowrt-installed

# Compiled modules are kept, whatever the environment says: hundreds of processes import them.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: run fast test test-long test-install test-real check bench bench-peers venv clean

venv: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $(STAMP)

run: $(STAMP)
	$(BIN)/flowrt run $(ARGS)

# What needs nothing but this machine, in 12 minutes on two cores: three files at a time, because tests with processes
# often wait; those begin first. Runs that take longest are left to test-long; the rest needs servers, a cluster or root.
REAL := gemma or sglang or vllm or slurm or netns or chromium or gpu or npu
PURE := tests/unit tests/property tests/architecture

# Between two edits: what needs no whole run, with fewer examples and at most three cases of a test with parameters;
# within 90 s on two cores.
fast: $(STAMP)
	$(BIN)/python -m pytest -n 2 --dist worksteal --hypothesis-profile fast --cases 3 -m "not (slow or long)" \
		$(PURE) $(ARGS)

# A failed test runs once more, alone; the names of those that pass then are shown at the end.
UNSTABLE := build/unstable.txt

test: $(STAMP)
	rm -f $(UNSTABLE)
	$(BIN)/python -m pytest --unstable $(UNSTABLE) -n 3 --dist loadfile --no-loadscope-reorder -m "not ($(REAL) or long)" \
		tests/integration tests/fault tests/property tests/architecture tests/unit $(ARGS)

test-long: $(STAMP)
	$(BIN)/python -m pytest -n 2 --dist worksteal --hypothesis-profile thorough -m "not long" $(PURE) $(ARGS)
	$(BIN)/python -m pytest -m "long and not ($(REAL))" $(ARGS)

test-real: $(STAMP)
	$(BIN)/python -m pytest -m "$(REAL)" $(ARGS)

# The wheel, installed without extras, with the newest and the oldest allowed dependencies: about 2.5 GB in /tmp.
test-install: $(STAMP)
	$(BIN)/python bench/wheel.py $(ARGS)

check: $(STAMP)
	scripts/check

bench: $(STAMP)
	$(BIN)/python bench/main_job.py --quick --json bench/results/main_job_quick.json
	$(BIN)/python bench/weights.py --quick --json bench/results/weights_quick.json
	$(BIN)/python bench/faults.py --quick --json bench/results/faults_quick.json

# Benchmarks that need a peer, which this builds: TRL and TransferQueue, each with an environment in the user's cache. Torch
# is installed first, in the version of this project: a peer alone would choose another one.
PEERS := $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/flowrt/peers
TRL := $(PEERS)/trl-1.16
TRANSFER_QUEUE := $(PEERS)/transfer-queue-0.1.11

$(TRL)/.installed: PEER := trl==1.16.*
$(TRANSFER_QUEUE)/.installed: PEER := TransferQueue==0.1.11
$(PEERS)/%/.installed:
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/pip install --quiet --disable-pip-version-check torch==$(TORCH)
	$(@D)/bin/pip install --quiet --disable-pip-version-check torch==$(TORCH) '$(PEER)'
	touch $@

TORCH = $(shell sed -n 's/^torch==\([0-9.]*\).*/\1/p' constraints.txt)
QUICK := --quick

bench-peers: $(STAMP) $(TRL)/.installed $(TRANSFER_QUEUE)/.installed
	$(BIN)/python bench/compare_trl.py $(QUICK) --baseline-python $(TRL)/bin/python \
		--json bench/results/compare_trl$(if $(QUICK),_quick).json
	$(BIN)/python bench/metadata.py $(QUICK) --baseline-python $(TRANSFER_QUEUE)/bin/python \
		--json bench/results/metadata$(if $(QUICK),_quick).json
	$(BIN)/python bench/tensors.py $(QUICK) --baseline-python $(TRANSFER_QUEUE)/bin/python \
		--json bench/results/tensors$(if $(QUICK),_quick).json

clean:
	rm -rf $(VENV) runs build *.egg-info
