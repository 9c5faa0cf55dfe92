# Each target sets up what it needs and is quick the second time.
PYTHON ?= python3

# For another torch than that of constraints.txt (TORCH=2.15.0, or the file of a wheel) all of it
# happens in a copy of the tree, which keeps an environment and a build of its own.
ifneq ($(TORCH),)
COPY := build/torch-$(notdir $(TORCH))
GOALS := $(or $(MAKECMDGOALS),setup)
.PHONY: $(GOALS)
.NOTPARALLEL:

$(GOALS):
	@$(PYTHON) release/copy_tree.py $(TORCH) $(COPY)
	$(MAKE) -C $(COPY) $@ TORCH=

else
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
CSRC := $(shell find foo_ops/csrc -name '*.cpp' -o -name '*.h')
# zentorch is made for one version of torch, and not for each.
ZENTORCH := $(if $(shell grep '^zentorch=' constraints.txt),"zentorch; platform_machine == 'x86_64'")
CPP_TESTS := $(wildcard tests/cpp/*)

# Compilers that remember, where Debian's ccache is installed: for new checkouts.
ifneq ($(wildcard /usr/lib/ccache),)
export PATH := /usr/lib/ccache:$(PATH)
export CCACHE_BASEDIR := $(CURDIR)
export CCACHE_NOHASHDIR := 1
endif

.PHONY: setup setup-test demo examples test test-all test-processors test-models conformance sanitize reliability bench docs lint wheel \
	sdist release-check clean

# The extension, and what most tests need: .venv/bin/python -m pytest tests/operators
setup: $(VENV)/.with-pytest

# And transformers, accelerate, matplotlib: for all tests.
setup-test: $(VENV)/.with-test

$(VENV)/.created:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "foo_ops needs Python 3.10 or newer, got " + sys.version.split()[0])'
	$(PYTHON) -m venv $(VENV)
	@touch $@

# torch comes first, and the build uses that one: an isolated build would download it again.
$(VENV)/.torch: $(VENV)/.created constraints.txt
	$(PIP) install -c constraints.txt torch numpy setuptools ninja
	@touch $@

# Compiles, or takes the extension from a wheel in build/dist that was built from the same sources.
$(VENV)/.built: $(VENV)/.torch setup.py $(CSRC)
	$(BIN)/python setup.py --quiet build_ext --inplace
	@touch $@

# A change of C++ is compiled before, and nothing is installed again.
$(VENV)/.installed: $(VENV)/.torch pyproject.toml setup.py | $(VENV)/.built
	$(PIP) install -c constraints.txt --no-build-isolation -e .
	@touch $@

# An extra of pyproject.toml, when a target first needs it.
$(VENV)/.with-%: $(VENV)/.installed
	$(PIP) install -c constraints.txt 'foo_ops[$*]' $(MORE)
	@touch $@

$(VENV)/.with-bench: MORE := $(ZENTORCH)

demo: $(VENV)/.with-demo
	$(BIN)/python -m foo_ops.demo

examples: $(VENV)/.with-examples
	$(BIN)/python examples/embeddings.py
	$(BIN)/python examples/checkpoints.py
	$(BIN)/python examples/quantization.py
	$(BIN)/python examples/llama_decoding.py
	$(BIN)/python examples/mixture.py

# Idle threads of one process must not keep the cores from another. Neighbours go to one of them,
# since they share what was computed for them.
PYTEST := OMP_WAIT_POLICY=passive $(BIN)/python -m pytest --numprocesses=auto --maxprocesses=4 --dist=worksteal

IN_PART := $(if $(PART),--part $(PART))

# The cases that find most, in a quarter of an hour. In three runs: collected cases, and compiled
# code that is never unloaded, would take 2 GB in each process of one.
MATRIX := tests/operators/test_matrix.py

test: $(VENV)/.with-test
	@failed=0; for cases in "$(MATRIX)" "tests/operators --ignore $(MATRIX)" "tests --ignore tests/operators"; do \
		echo "pytest $$cases"; $(PYTEST) $$cases || failed=1; done; exit $$failed

# Everything, an hour and more: all dtypes, devices and samples, Inductor, several processes, models
# of transformers, and kernels as on other processors. PART=2/4 runs the second of four parts.
test-all: $(VENV)/.with-test $(VENV)/.with-bench
	$(PYTEST) --whole $(IN_PART)
	$(BIN)/python tests/processors.py $(IN_PART)
	OMP_WAIT_POLICY=passive $(BIN)/python tests/models.py $(IN_PART)

# Kernels for each width of vectors, each way to multiply, and other processors.
test-processors: $(VENV)/.with-test
	$(BIN)/python tests/processors.py

# All models of transformers that can be made small, after apply against the same as they are; the
# manual's table of models with OPTIONS=--publish.
test-models: $(VENV)/.with-test
	OMP_WAIT_POLICY=passive $(BIN)/python tests/models.py $(OPTIONS)

# PyTorch's own tables of operators, modules and optimizers, on foo against the CPU.
conformance: $(VENV)/.with-pytest
	$(BIN)/python tests/conformance

# The C++ tests, and of the extension what they run, under the sanitizers of addresses and of
# undefined behaviour; and the tests of threads under that of races, with the files that have locks
# and atomic figures: of what passes through torch it cannot tell. Kernels need Python, and so their
# launchers stay outside.
SANITIZED := build/sanitized
SANITIZED_SOURCES := $(filter %.cpp,$(filter $(addprefix foo_ops/csrc/,launch/% device/% aten/%),$(CSRC)))
TESTS_memory := $(filter %.cpp,$(CPP_TESTS))
TESTS_races := tests/cpp/main.cpp tests/cpp/test_threads.cpp
SANITIZERS_memory := -fsanitize=address,undefined -fno-sanitize-recover=all -fopenmp
SANITIZERS_races := -fsanitize=thread -fopenmp
TORCH_FOLDER = $(shell $(BIN)/python -c 'import importlib.util as util; print(util.find_spec("torch").submodule_search_locations[0])')

sanitize: $(SANITIZED)/memory/run $(SANITIZED)/races/run
	OMP_NUM_THREADS=2 $(SANITIZED)/memory/run
	OMP_NUM_THREADS=1 $(SANITIZED)/races/run

define sanitized_tests
$(SANITIZED)/$(1)/run: $(patsubst %.cpp,$(SANITIZED)/$(1)/%.o,$(SANITIZED_SOURCES) $(TESTS_$(1)))
	$$(CXX) $$(SANITIZERS_$(1)) $$^ -o $$@ -L$$(TORCH_FOLDER)/lib -Wl,-rpath,$$(TORCH_FOLDER)/lib -ltorch -ltorch_cpu -lc10

$(SANITIZED)/$(1)/%.o: %.cpp $(filter %.h,$(CSRC) $(CPP_TESTS)) | $(VENV)/.built
	@mkdir -p $$(@D)
	$$(CXX) -std=c++20 -O1 -g1 -Wall -Wno-unknown-pragmas $$(SANITIZERS_$(1)) -Ifoo_ops/csrc -Itests/cpp \
		-isystem $$(TORCH_FOLDER)/include -isystem $$(TORCH_FOLDER)/include/torch/csrc/api/include -c $$< -o $$@
endef
$(eval $(call sanitized_tests,memory))
$(eval $(call sanitized_tests,races))
$(SANITIZED)/races/foo_ops/csrc/aten/%.o $(SANITIZED)/races/foo_ops/csrc/launch/%.o \
	$(SANITIZED)/races/tests/cpp/main.o: SANITIZERS_races := -fopenmp
$(patsubst %,$(SANITIZED)/races/foo_ops/csrc/launch/%.o,fork_mutex kernel_table registration): \
	SANITIZERS_races := -fsanitize=thread -fopenmp

# Eight threads for a minute, a million operators, memory that runs out, a hundred thousand steps of
# random sequences beside the same on the CPU: all figures exact.
reliability: $(VENV)/.with-pytest
	$(BIN)/python tests/reliability.py

bench: $(VENV)/.with-bench
	$(BIN)/python -m benchmarks $(THREADS:%=--threads %)

# Strict: a broken link fails.
docs: $(VENV)/.with-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet

lint: $(VENV)/.with-lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run --Werror $(CSRC) $(CPP_TESTS)
	$(BIN)/mypy

# For the torch that is installed, into build/dist. What setuptools has gathered before would be
# packed, too.
wheel: $(VENV)/.installed
	rm -rf build/lib build/lib.* build/bdist.* build/dist/*.whl
	$(PIP) wheel --no-deps --no-build-isolation --wheel-dir build/dist .
	$(BIN)/python release/check_wheel.py build/dist/*.whl

sdist: $(VENV)/.installed
	rm -f build/dist/*.tar.gz
	$(BIN)/python -c 'from setuptools.build_meta import build_sdist; build_sdist("build/dist")' > build/sdist.log
	$(BIN)/python release/check_sdist.py build/dist/*.tar.gz

# On a clean clone of what is committed, as others get it.
release-check:
	rm -rf build/release
	git clone --quiet . build/release
	$(MAKE) -C build/release lint docs wheel sdist test-all conformance

clean:
	rm -rf $(VENV) build foo_ops.egg-info foo_ops/_C*.so .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find foo_ops tests benchmarks examples -name __pycache__ -type d -prune -exec rm -rf {} +

endif
