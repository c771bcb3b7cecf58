# The same targets for people and for CI. Each does all its own set-up; a second run is quick.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
INSTALLED_TEST := $(VENV)/.installed-test
# Tools that have environments of their own.
SUPPLY := .venv-supply
SITE := .venv-docs

# One process runs the tests that start Ray, the others all the rest: it waits now and then.
TEST_PROCESSES ?= 3
TESTS = $(BIN)/python -m pytest -q -n $(TEST_PROCESSES) --dist loadscope --no-loadscope-reorder
# A test that hangs ends its process with the stacks of all threads, and fails.
BOUNDED = $(TESTS) -o faulthandler_timeout=480 -o faulthandler_exit_on_timeout=true

# What `determinism: strict` needs in a process before python starts.
export PYTHONHASHSEED := 0

.PHONY: train test lint types imports unit scenarios guard wheel-check docs pictures exact chaos soak bench gpu mutants newest-ray oldest-torch lock sbom audit clean

train: $(INSTALLED)  ## train handwritten digits on two local workers
	$(BIN)/lockstep train jobs/digits/train.yaml

# Beside the tests, which wait for each other now and then.
test: $(INSTALLED_TEST)  ## what has to hold, or a covering part of it
	@$(MAKE) --no-print-directory --jobs=2 unit lint types imports guard

lint: $(INSTALLED_TEST)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: $(INSTALLED_TEST)
	$(BIN)/mypy

imports: $(INSTALLED_TEST)
	$(BIN)/lint-imports

unit: $(INSTALLED_TEST)
	$(BOUNDED)

scenarios: $(INSTALLED_TEST)  ## whole commands and clusters, killed, stopped and resumed, which a change has to pass before it lands
	$(BOUNDED) -m "scenario and not exact"

# A commit that changes bits on purpose says "changes bits" in its message.
guard: $(INSTALLED_TEST)  ## the working tree trains the bits of the commit before the newest
	@if ! git rev-parse --quiet --verify HEAD~1 > /dev/null 2>&1; then echo "guard: skipped, this clone has no commit before the newest"; \
	elif git log -1 --format=%B | grep -qi "changes bits"; then echo "guard: skipped, the newest commit says that it changes bits"; \
	else $(BIN)/lockstep guard jobs/digits/train.yaml --base HEAD~1 --steps 2 rehearsal=off; fi

wheel-check:  ## the built wheel trains a job in an empty environment, away from the checkout
	$(PYTHON) -m tests.wheel_check .venv-wheel

docs: $(INSTALLED) $(SITE)/.installed  ## the pages that are generated, and build/site: all pages with search, their links checked
	$(BIN)/python -m tests.reference
	NO_MKDOCS_2_WARNING=1 $(SITE)/bin/mkdocs build --quiet

pictures: $(INSTALLED_TEST)  ## the pictures of the README, made anew of a run and a sweep (needs chromium; minutes)
	$(BIN)/python -m tests.pictures

exact: $(INSTALLED_TEST)  ## the full product of every exactness matrix (long)
	$(TESTS) -m exact

chaos: ROUNDS = 200
chaos: $(INSTALLED_TEST)  ## ROUNDS=200 seeded faults of fifteen kinds, kills among them, held against runs and sweeps left alone (hours)
	$(BIN)/python -m tests.chaos.disturbed --faults $$(( $(ROUNDS) - $(ROUNDS) / 4 ))
	$(BIN)/python -m tests.chaos.disturbed_sweep --faults $$(( $(ROUNDS) / 4 ))

# Each case follows from its seed. One that fails is made smaller, and lies in build/soak: `python -m tests.soak --replay` tries it again.
HOURS ?= 2
soak: $(INSTALLED_TEST)  ## HOURS=2 of random programs under random faults, each held against the same run left alone
	$(BIN)/python -m tests.soak --hours $(HOURS) --seed $(SEED)

# In copies of the working tree. Answers are kept in .mutants: interrupted, it goes on where it was.
SAMPLE ?= 20
SEED ?= 0
mutants: $(INSTALLED_TEST)  ## SAMPLE=20 small mistakes in each module that the promise rests on: a test has to fail for each (hours; MODULES=… for some)
	$(BIN)/python -m tests.mutants --sample $(SAMPLE) --seed $(SEED) $(MODULES)

# How often a worker is killed, with each number of workers.
ROUNDS ?= 10

bench: $(INSTALLED_TEST)  ## speed beside named peers, as ratios (long)
	$(BIN)/python -m tests.benchmarks.commands
	$(BIN)/python -m tests.benchmarks.step_time
	$(BIN)/python -m tests.benchmarks.step_costs
	$(BIN)/python -m tests.benchmarks.mirrors
	$(BIN)/python -m tests.benchmarks.mirrors --sharding full
	$(BIN)/python -m tests.benchmarks.first_step
	$(BIN)/python -m tests.benchmarks.first_step --warm
	$(BIN)/python -m tests.benchmarks.watching
	$(BIN)/python -m tests.benchmarks.agreement
	$(BIN)/python -m tests.benchmarks.self_check
	$(BIN)/python -m tests.benchmarks.evaluation_beside
	$(BIN)/python -m tests.benchmarks.memory
	$(BIN)/python -m tests.benchmarks.full_sharding
	$(BIN)/python -m tests.benchmarks.whole_batch
	$(BIN)/python -m tests.benchmarks.sparse_tables
	$(BIN)/python -m tests.benchmarks.slow_network
	$(BIN)/python -m tests.benchmarks.checkpoints
	$(BIN)/python -m tests.benchmarks.recording
	$(BIN)/python -m tests.benchmarks.million
	$(BIN)/python -m tests.benchmarks.tables
	$(BIN)/python -m tests.benchmarks.orders
	$(BIN)/python -m tests.benchmarks.restart --kills worker --workers 2,3,4 --rounds $(ROUNDS) --per-run 5 --calm 20
	$(BIN)/python -m tests.benchmarks.restart --kills node
	$(BIN)/python -m tests.benchmarks.outliving --minutes 3 --every 30
	$(BIN)/python -m tests.benchmarks.sweeps
	$(BIN)/python -m tests.benchmarks.trials

# Without Ray and without a network: the environment where there is one, else any Python with the packages that docs/guarantees.md names.
gpu:  ## what only a GPU can show: a table, and the page gpu.md; names what it skips where there is no CUDA
	PYTHONPATH=platform $(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON)) -m tests.gpu.report

NEWEST := .venv-newest-ray

newest-ray:  ## a small run with the newest Ray that installs, through its private parts and without them
	$(PYTHON) -m venv $(NEWEST)
	grep -v '^ray==' constraints.txt > $(NEWEST)/constraints.txt
	$(NEWEST)/bin/python -m pip install --quiet --constraint constraints.txt torch
	$(NEWEST)/bin/python -m pip install --quiet --upgrade --constraint $(NEWEST)/constraints.txt --editable ".[jobs]" "ray[default,train,tune]"
	for public in 0 1; do \
	  LOCKSTEP_PUBLIC_RAY=$$public $(NEWEST)/bin/lockstep train jobs/digits/train.yaml --address local length.epochs=1 \
	    record.uri=off checkpoint.storage=$(NEWEST)/runs || exit 1; \
	done

OLDEST := .venv-oldest-torch

# The newest of that minor version; away from its own index it comes with CUDA packages.
oldest-torch:  ## the tests of the step with the oldest torch that is admitted (gigabytes, half an hour)
	$(PYTHON) -m venv $(OLDEST)
	grep -v '^torch==' constraints.txt > $(OLDEST)/constraints.txt
	$(OLDEST)/bin/python -m pip install --quiet --constraint $(OLDEST)/constraints.txt "torch==2.11.*" --editable ".[jobs,test]"
	$(OLDEST)/bin/python -m pytest -q -n 2 tests/distributed tests/unit/training tests/unit/checkpoint

# What a failed start leaves is taken away again: the next one would think that it is there. Debian has venv in a package of its own, python3-venv.
$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Lockstep needs Python 3.11 or newer, got %d.%d: make PYTHON=python3.11" % sys.version_info[:2])'
	$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 1; }

# torch goes first and by its pinned version: a range would fetch the newest build with its CUDA packages. It is the one package without a
# hash: which build of it is right depends on the machine, and each has its own. All else is held against the hashes of PyPI.
$(INSTALLED): pyproject.toml constraints.txt requirements/train.txt | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(HASHED) --requirement requirements/train.txt
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation --editable .
	touch $@

$(INSTALLED_TEST): $(INSTALLED) requirements/test.txt
	$(HASHED) --requirement requirements/test.txt
	touch $@

HASHED = $(BIN)/python -m pip install --quiet --require-hashes --no-deps

# --- what it is made of -----------------------------------------------------------------------------------

# What comes with a build of torch. torchvision, which nothing here imports, would break on another one.
OF_TORCH := torch torchvision triton cuda-bindings cuda-pathfinder cuda-toolkit nvidia-cublas nvidia-cuda-cupti nvidia-cuda-nvrtc nvidia-cuda-runtime \
  nvidia-cudnn-cu13 nvidia-cufft nvidia-cufile nvidia-curand nvidia-cusolver nvidia-cusparse nvidia-cusparselt-cu13 nvidia-nccl-cu13 \
  nvidia-nvjitlink nvidia-nvshmem-cu13 nvidia-nvtx
LOCK = $(SUPPLY)/bin/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --constraint constraints.txt \
  --default-index https://pypi.org/simple --no-header --no-annotate $(addprefix --no-emit-package ,$(OF_TORCH))

$(SUPPLY)/.installed $(SITE)/.installed: .venv-%/.installed: requirements/%.txt
	$(PYTHON) -m venv .venv-$*
	.venv-$*/bin/python -m pip install --quiet --require-hashes --no-deps --requirement $<
	touch $@

lock: $(SUPPLY)/.installed  ## requirements/*.txt anew: the hashes of all pins, after a change of pyproject.toml or constraints.txt
	$(LOCK) pyproject.toml requirements/build.in --extra jobs --output-file requirements/train.txt
	$(LOCK) pyproject.toml requirements/build.in --extra jobs --extra test --output-file requirements/test.txt
	$(LOCK) requirements/supply.in --output-file requirements/supply.txt
	$(LOCK) requirements/docs.in --output-file requirements/docs.txt

sbom: $(INSTALLED) $(SUPPLY)/.installed  ## sbom.json: the packages that `make train` installs, in CycloneDX
	$(SUPPLY)/bin/cyclonedx-py environment --pyproject pyproject.toml --output-reproducible --output-format JSON --output-file sbom.json $(BIN)/python

audit: $(SUPPLY)/.installed  ## known vulnerabilities of all pins; asks PyPI's service, and fails where it does not answer
	@{ sed -nE 's/^([A-Za-z0-9].*==.*) \\$$/\1/p' requirements/test.txt; grep '^torch==' constraints.txt; } > $(SUPPLY)/pins.txt
	@$(SUPPLY)/bin/pip-audit --strict --disable-pip --no-deps --requirement $(SUPPLY)/pins.txt 2> $(SUPPLY)/audit.log; code=$$?; \
	if grep -qE "ConnectionError|ServiceError|ConnectTimeout|connect to|timed out" $(SUPPLY)/audit.log; then \
	  echo "audit: PyPI's vulnerability service does not answer; nothing was checked. Run it again where there is a network" >&2; exit 3; fi; \
	cat $(SUPPLY)/audit.log >&2; exit $$code

clean:
	rm -rf $(VENV) $(NEWEST) $(SUPPLY) $(SITE) sbom.json .venv-wheel .mypy_cache .ruff_cache .pytest_cache .hypothesis build *.egg-info platform/*.egg-info
