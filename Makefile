# The first Python that TensorFlow has packages for.
PYTHON ?= $(shell for python in python3 python3.13 python3.12 python3.11 python3.10; do \
	$$python -c 'import sys; sys.exit(not (3, 10) <= sys.version_info < (3, 14))' 2>/dev/null && echo $$python && break; done)
VENV := .venv
BIN := $(VENV)/bin

.DEFAULT_GOAL := help
.PHONY: help mnist check test test-all test-ecosystem test-host test-versions test-slow fuzz endurance coverage mutants benchmarks gpu-audit gpu-test docs docs-serve lint audit recipe-figures recipe-smoke clean

help:  ## Show what there is to make.
	@echo "keras_dp. All that is needed is installed in $(VENV). make ..."
	@sed -n 's/^\([a-z-]*\):.*##  *\(.*\)/\1\t\2/p' $(MAKEFILE_LIST) | expand -t 18 | fold -s -w 126

mnist: $(VENV)/examples.installed  ## Train on images of MNIST, on two towers and on one device; DATA=download or a file for all of MNIST.
	$(BIN)/python examples/mnist_cnn.py --towers 2 --compare $(if $(DATA),--data $(DATA))

check: lint  ## Check style, types and imports, and run the unit tests: before each commit.
	$(BIN)/python -m pytest -n 2 -m "not slow and not processes" tests/unit

test: $(VENV)/dev.installed  ## Run the test of each promise, in six minutes.
	$(BIN)/python -m pytest -n 3 --dist worksteal -m promise

test-all: $(VENV)/dev.installed  ## Run all tests but those that take long.
	$(BIN)/python -m pytest -n 3 --dist worksteal --durations=20

test-slow: $(VENV)/dev.installed  ## Run the tests that take long: applications, and hundreds of random models.
	$(BIN)/python -m pytest -n 2 -m slow

test-versions: $(BIN)/python  ## Run the tests of promises with each pair of Keras and TensorFlow that is supported.
	.ci/versions

# Warnings of other projects are theirs.
test-ecosystem: $(VENV)/dev.installed $(VENV)/ecosystem.installed  ## Run programs with the tools that users of Keras have.
	$(BIN)/python -m pytest -n 2 -W default tests/ecosystem

test-host: $(VENV)/dev.installed $(VENV)/ecosystem.installed  ## Run Keras's own tests, with each model and optimizer wrapped.
	$(BIN)/python -m pytest -n 2 -c tests/host/pytest.ini --pyargs \
		$(addprefix keras.src.,callbacks layers.normalization models optimizers trainers)

fuzz: $(VENV)/dev.installed  ## Draw random programs, and compare them on towers with one device; OPTIONS="--count 1000 --seed 5".
	PYTHONPATH=tests $(BIN)/python -m fuzz $(OPTIONS)

endurance: $(VENV)/dev.installed  ## Work for hours, and look for growth of memory, functions, threads and files; OPTIONS="--share 0.1" for less.
	PYTHONPATH=tests $(BIN)/python -m endurance $(OPTIONS)

coverage: $(VENV)/coverage.installed  ## Count the lines and branches that tests run, in all processes; OPTIONS="-m promise" for fewer tests.
	$(BIN)/python -m coverage erase
	-$(BIN)/python -m coverage run -m pytest -n 2 $(OPTIONS)
	$(BIN)/python -m coverage combine --quiet
	$(BIN)/python -m coverage html --quiet
	$(BIN)/python -m coverage report

mutants: $(VENV)/mutation.installed  ## Put small faults into the partitioner, and print those that no test notices; OPTIONS="--count 200 --seed 5".
	PYTHONPATH=tests $(BIN)/python -m mutation $(OPTIONS)

benchmarks: $(VENV)/examples.installed  ## Measure the tables of docs/benchmarks.md; goes on where it was interrupted; TABLES="mlp lstm" for some.
	$(BIN)/python examples/benchmarks/write_tables.py $(TABLES)

gpu-audit: $(VENV)/examples.installed  ## Audit and simulate steps on GPUs, without one, for the tables of docs/gpu_audit.md; goes on where it was interrupted.
	$(BIN)/python examples/benchmarks/gpu_audit.py --weak --check $(if $(WRITE),--write)

# The libraries of CUDA are large: only machines with a driver for GPUs need them.
CUDA := $(if $(wildcard /proc/driver/nvidia/gpus /usr/lib/wsl/lib/libcuda.so.1),$(VENV)/cuda.installed)

gpu-test: $(VENV)/dev.installed $(CUDA)  ## Run on this machine's GPUs what they can teach, in 35 minutes; OPTIONS="--minutes 10" for less.
	PYTHONPATH=tests $(BIN)/python -m gpu $(OPTIONS)

COMPARE := $(BIN)/python examples/cifar10_resnet.py --compare

recipe-figures: $(VENV)/examples.installed  ## Train what docs/large_batches.md compares, 27 times; goes on where it was interrupted.
	$(COMPARE) --towers 8 --epochs 10 --warmup-epochs 2 --seeds 3 --batch-norms local sync \
		--out results/large_batches $(if $(DATA),--data $(DATA))

recipe-smoke: $(VENV)/examples.installed  ## The same in a minute, to see that it runs.
	$(COMPARE) --towers 4 --epochs 3 --warmup-epochs 1 --depth 8 --images 1024 \
		--out results/smoke $(if $(DATA),--data $(DATA))

SITE := -W --keep-going --nitpicky --quiet docs docs/_build/html

docs: $(VENV)/docs.installed  ## Build the documentation's site in docs/_build/html; a link or an anchor that leads nowhere is an error.
	TF_CPP_MIN_LOG_LEVEL=3 $(BIN)/python -m sphinx -E -a $(SITE)

docs-serve: $(VENV)/docs.installed  ## Show the site at http://127.0.0.1:8000, and build it again when a page changes.
	TF_CPP_MIN_LOG_LEVEL=3 $(BIN)/python -m sphinx_autobuild $(SITE)

lint: $(VENV)/dev.installed  ## Check style, types and imports.
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

audit: $(VENV)/audit.installed  ## Look up known vulnerabilities of all that an installation brings; needs a connection to PyPI.
	.ci/audit

clean:  ## Remove the virtual environment.
	rm -rf $(VENV)

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "keras_dp needs Python 3.10, 3.11, 3.12 or 3.13; name one with make PYTHON=..."; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/%.installed: setup.py pyproject.toml | $(BIN)/python
	@echo "Installing what '$*' needs in $(VENV): TensorFlow and others, which takes a minute or more."
	@$(BIN)/python -m pip install --disable-pip-version-check --quiet --editable ".[$*]"
	@touch $@
