# make demo    train a LightningIndexer on real text: seven minutes from nothing, three of training
# make demo-full   the same with twice the steps: the figures of the docs
# make test    build `_C` and run the CPU tests that every change runs; SEED=... chooses what runs by
#              turns, without it the commit does
# make test-npu   build `_npu` and the simulated CANN, and run the tests of the NPU on it
# make test-all   every test there is, in hours: before a release, and every night
# make smoke   with torch SMOKE_TORCH, the tests of what depends on torch's version
# make bench   the benchmarks: ours, the peer and the physical limit side by side; writes the tables
#              of the docs. ROUNDS=1: faster, and less exact
# make bench-check   what of ours is slower than in OLD=results.json; without, than what is committed
# make fuzz    random calls until SECONDS=600 are over, from SEED=123; without, from the commit's
# make sanitize   tests and random calls with C++ that checks itself: AddressSanitizer and UBSan;
#              with SANITIZE_ARGS=--threads, ThreadSanitizer and the tests of several threads
# make coverage   which lines of C++ and Python the tests execute, and which they do not
# make mutants how many of 131 small errors in C++ and Python the tests notice
# make lint    ruff, clang-format, mypy, spelling, English, workflows, translations
# make docs    the documentation as a site, in out/docs/html
# make wheel   a wheel in dist/, for the torch of PYTHON
# make wheels  wheels in dist/ for VERSIONS, and for all PYTHONS
# make matrix  build and test with VERSIONS, SHARE=12 a part of the tests; prints a table
# make clean   remove what was built
# make test-aarch64   cross-compile for ARM hosts, and run a sample of the tests in QEMU
#
# `build-npu`, which the NPU tests and benchmarks need, also builds simulation/, the simulated CANN.
# Builds are for this processor's vector unit alone, and _npu and the simulation at -O1, except for
# benchmarks and test-all; VECTOR_UNITS=all (or avx2, ...) and NPU_FLAGS= change that.
# Targets set up .venv and .venv-npu in this checkout as needed, and reuse them. PYTHON selects the
# interpreter, MAX_JOBS the number of parallel compilers, TEST_JOBS that of the processes which run
# tests (0: none besides pytest's own). VERSIONS="2.7.1 2.10.0:2.10.0.post4" are
# versions of torch, each alone or with that of torch_npu.

PYTHON ?= python3
TORCH := torch==2.13.0
TORCH_NPU := torch_npu==2.13.0
BUILD_TOOLS := 'setuptools>=77,<82' wheel 'ninja>=1.11'
PICTURES := 'matplotlib>=3.8,<4'

CPU := .venv/bin/python
NPU := .venv-npu/bin/python
SPHINX := $(CPU) -m sphinx --quiet --fail-on-warning --keep-going -d out/docs/doctrees
PIP_INSTALL := -m pip install --disable-pip-version-check --quiet --progress-bar off

# For random calls and for what runs by turns: other ones for every commit.
SEED ?= $(shell echo 0x$$(git rev-parse HEAD 2> /dev/null || echo 0))
export SEED

# All C++ files that git tracks are ours to format.
CPP_FILES = $(shell git ls-files '*.cpp' '*.h')

.PHONY: demo demo-full test test-npu test-all smoke fuzz sanitize coverage mutants bench bench-check lint format docs \
	wheel wheels matrix test-aarch64 clean build build-npu say-what-demo-does

# Threads that wait at a barrier sleep: beside other work they would take the time of the others.
demo demo-full docs: export OMP_WAIT_POLICY := passive

demo: say-what-demo-does build
	@$(CPU) examples/train_lightning_indexer.py --warmup-steps 120 --sparse-steps 240 $(DEMO_ARGS)

demo-full: build
	@$(CPU) examples/train_lightning_indexer.py $(DEMO_ARGS)

say-what-demo-does:
	@echo "Builds the operators and trains a small language model with its indexers on Python's"
	@echo "standard library: about 7 minutes on 2 cores the first time, and 3 when all is built."

TEST_JOBS ?= $(shell nproc)
IN_PARALLEL = -n $(TEST_JOBS) --dist=loadgroup

test: build .venv/test
	$(CPU) -m pytest --ignore=tests/npu $(IN_PARALLEL) $(PYTEST_ARGS)
	@echo "The CPU tests passed. make test-npu runs those of the NPU, on a simulated CANN."

test-npu: build-npu
	$(NPU) tests/npu/run.py $(IN_PARALLEL) $(PYTEST_ARGS)

# Packages whose programs run over ours.
OTHERS := yunchang==0.6.* ring_flash_attn==0.1.* 'trl>=1.16,<2' 'peft>=0.21,<1' 'datasets>=5,<6'

# The integrations go back to it; the environment has the newest.
OLDEST := 'transformers==5.23.*'

# Every dtype, level, device, example, number of ranks and vector unit, and other versions.
test-all: build-npu .venv/test
	$(MAKE) fuzz SECONDS=600
	$(CPU) $(PIP_INSTALL) $(OTHERS) torch==$(shell $(CPU) -c 'import torch; print(torch.__version__)')
	$(CPU) -m pytest --ignore=tests/npu --all $(IN_PARALLEL)
	$(CPU) $(PIP_INSTALL) --no-deps --upgrade --target out/oldest $(OLDEST)
	PYTHONPATH=$(CURDIR)/out/oldest $(CPU) -m pytest --all $(IN_PARALLEL) tests/integrations \
		tests/programs/test_sft_program.py tests/programs/test_trainer_programs.py
	$(NPU) tests/npu/run.py --all $(IN_PARALLEL)
	$(MAKE) matrix SHARE=12

SMOKE_TORCH := 2.10.0

# One build without the NPU, at -O1.
smoke:
	ASCEND_ATTN_OPS_FLAGS=-O1 ASCEND_ATTN_OPS_VECTOR_UNITS=native $(PYTHON) tools/matrix.py $(SMOKE_TORCH) --smoke

# SECONDS is a variable of bash, which counts up: from the environment it would be any number.
fuzz: build
	MALLOC_PERTURB_=165 $(CPU) tests/fuzz/run.py \
		--seconds $(if $(filter command line,$(origin SECONDS)),$(SECONDS),600) \
		--seed $(SEED) $(FUZZ_ARGS)

sanitize: .venv/test .venv-npu/ready
	$(CPU) tools/sanitize.py --seed $(SEED) $(SANITIZE_ARGS)

coverage: .venv/test .venv-npu/ready
	set -e; for python in $(CPU) $(NPU); do $$python $(PIP_INSTALL) 'coverage[toml]>=7.10,<8'; done
	$(CPU) tools/coverage.py --lines $(COVERAGE_ARGS)

mutants: .venv/test .venv-npu/ready
	$(CPU) tools/mutation.py $(MUTANTS_ARGS)

# A file of its own, so that a run that fails leaves the tables alone.
BENCH_RESULTS := out/bench.json
BENCH_OPTIONS = --json $(BENCH_RESULTS) $(if $(ROUNDS),--rounds $(ROUNDS))
CPU_BENCHMARKS := sparse_flash_attention sparse_flash_mla lightning_indexer sparse_decode flash_attention_score \
	sinks_and_ropes prompt_flash_attention fused_infer_attention_score scatter_pa_kv_cache \
	call_overhead dtensor_call threads training_step transformers_training
NPU_BENCHMARKS := host_time simulated_operators

bench: build-npu .venv/test
	rm -f $(BENCH_RESULTS)
	set -e; for name in $(CPU_BENCHMARKS); do $(CPU) benchmarks/$$name.py $(BENCH_OPTIONS); done
	set -e; for name in $(NPU_BENCHMARKS); do $(NPU) benchmarks/$$name.py $(BENCH_OPTIONS); done
	$(CPU) benchmarks/write_tables.py $(BENCH_RESULTS)

bench-check: .venv/ready
	mkdir -p out
	$(if $(OLD),cp $(OLD),git show HEAD:benchmarks/results.json >) out/bench_old.json
	$(CPU) benchmarks/compare.py out/bench_old.json $(or $(NEW),$(BENCH_RESULTS))

# mypy also reads the extensions of docs/ and the simulation's plugin for pytest.
lint: .venv/lint .venv/docs .venv/test
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/clang-format --dry-run -Werror $(CPP_FILES)
	.venv/bin/mypy
	.venv/bin/codespell $(shell git ls-files)
	$(CPU) tools/lint.py

format: .venv/lint
	.venv/bin/ruff check --fix .
	.venv/bin/ruff format .
	.venv/bin/clang-format -i $(CPP_FILES)

# Warnings are errors, and unresolved references are warnings. Tests run the pages' code.
docs: build .venv/docs
	$(SPHINX) -b html docs out/docs/html

wheel:
	$(PYTHON) $(PIP_INSTALL:install=wheel) --no-build-isolation --no-deps --wheel-dir dist .

wheels:
	$(PYTHON) tools/wheels.py $(VERSIONS) --python $(or $(PYTHONS),$(PYTHON))

OTHER_VERSIONS := 2.7.1:2.7.1.post11 2.10.0:2.10.0.post4 2.14.0:2.14.0 2.15.0

matrix:
	$(PYTHON) tools/matrix.py $(or $(VERSIONS),$(OTHER_VERSIONS)) --share $(or $(SHARE),1) $(MATRIX_ARGS)

test-aarch64:
	$(PYTHON) tools/aarch64.py $(VERSIONS) --share $(or $(SHARE),60)

clean:
	rm -rf build build-npu simulation/build .venv .venv-npu out .pytest_cache .ruff_cache .mypy_cache
	find python simulation -name '*.so' -delete
	rm -f python/ascend_attn_ops/built_with.json simulation/cann_simulator/built_with.json

# Benchmarks and the tests before a release compile as users do.
VECTOR_UNITS ?= native
NPU_FLAGS ?= -O1
bench test-all: export VECTOR_UNITS := all
bench test-all: export NPU_FLAGS :=

# Compiles only what has changed.
build: .venv/ready
	@echo "Building the operators for the CPU (a few minutes the first time) ..."
	@ASCEND_ATTN_OPS_VECTOR_UNITS=$(VECTOR_UNITS) $(CPU) setup.py -q build_ext --inplace

# Both environments have the same torch, so `_C` is compiled only once.
build-npu: build .venv-npu/ready
	@echo "Building the NPU kernels and the simulated CANN ..."
	@ASCEND_ATTN_OPS_BUILD=npu ASCEND_ATTN_OPS_FLAGS="$(NPU_FLAGS) $$ASCEND_ATTN_OPS_FLAGS" \
		$(NPU) setup.py -q build_ext --inplace --build-temp build-npu
	@cd simulation && CANN_SIMULATOR_FLAGS="$(NPU_FLAGS) $$CANN_SIMULATOR_FLAGS" \
		$(CURDIR)/$(NPU) setup.py -q build_ext --inplace

# Installs torch first: the extension is compiled against the torch that it will run with, and
# without build isolation, which would fetch another one.
.venv/ready: pyproject.toml Makefile
	@echo "Installing torch and the tools of the build in .venv (a minute or two) ..."
	@$(PYTHON) -m venv .venv
	@$(CPU) $(PIP_INSTALL) $(TORCH) $(BUILD_TOOLS) $(PICTURES)
	@ASCEND_ATTN_OPS_BUILD=none $(CPU) $(PIP_INSTALL) --no-build-isolation --no-deps -e .
	@touch $@

# The extras of pyproject.toml.
.venv/test .venv/lint .venv/docs: .venv/ready
	@echo "Installing what $(@F) needs in .venv ..."
	@ASCEND_ATTN_OPS_BUILD=none $(CPU) $(PIP_INSTALL) --no-build-isolation -e '.[$(@F)]'
	@touch $@

# torch_npu has an environment of its own: where it is installed, `import torch` loads it.
.venv-npu/ready: pyproject.toml Makefile
	@echo "Installing torch and torch_npu in .venv-npu (a minute or two) ..."
	@$(PYTHON) -m venv .venv-npu
	@$(NPU) $(PIP_INSTALL) $(TORCH) $(BUILD_TOOLS) $(PICTURES) 'pytest>=8,<10' 'pytest-xdist>=3.6,<4' \
		'numpy>=1.26,<3' 'pyyaml>=6,<7' 'transformers>=5.23,<5.25' 'accelerate>=1.1,<2'
	@$(NPU) $(PIP_INSTALL) --no-deps $(TORCH_NPU)
	@touch $@
