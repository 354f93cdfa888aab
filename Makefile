# The first Python that TensorFlow has packages for.
PYTHON ?= $(shell for python in python3 python3.13 python3.12 python3.11; do \
	$$python -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null && echo $$python && break; done)
VENV := .venv
BIN := $(VENV)/bin

.PHONY: mnist test test-slow lint clean

mnist: $(VENV)/examples.installed  ## Train on MNIST on two towers; make mnist DATA=FILE.npz takes a file.
	$(BIN)/python examples/mnist_cnn.py --towers 2 $(if $(DATA),--data $(DATA))

test: $(VENV)/dev.installed  ## Run all tests but those that take long.
	$(BIN)/python -m pytest -n 2

test-slow: $(VENV)/dev.installed  ## Run the tests that take long: applications, and hundreds of random models.
	$(BIN)/python -m pytest -n 2 -m slow

lint: $(VENV)/dev.installed  ## Check style and types.
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:  ## Remove the virtual environment.
	rm -rf $(VENV)

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "keras_dp needs Python 3.11, 3.12 or 3.13; name one with make PYTHON=..."; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/%.installed: setup.py pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --disable-pip-version-check --quiet --editable ".[$*]"
	touch $@
