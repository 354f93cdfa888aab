"""The package refuses other backends, and has complete metadata."""

import os
import pkgutil
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
import ways_of_wrapping
from forked_processes import output_of

import keras_dp

ROOT = Path(__file__).parents[2]
PACKAGE = Path(keras_dp.__file__).parent


def run_in_new_process(script, stdout=subprocess.PIPE, **environment):
    command = [sys.executable, "-c", script]
    return subprocess.run(command, stdout=stdout, stderr=subprocess.PIPE, text=True, env=os.environ | environment)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("choice", "reason"),
    [
        ("import keras; keras.config.backend = lambda: 'jax'", ""),
        ("import os; os.environ['KERAS_BACKEND'] = 'jax'", ", which needs a package that is missing: jax"),
    ],
)
def test_another_backend_is_refused(choice, reason, tmp_path):
    """Keras alone fails with Python's import error if the backend's package is missing."""
    (tmp_path / "jax.py").write_text("raise ModuleNotFoundError('No module named jax', name='jax')")
    result = run_in_new_process(f"{choice}; import keras_dp; keras_dp.callbacks", PYTHONPATH=str(tmp_path))
    last = result.stderr.splitlines()[-1]
    assert last.startswith("ImportError: keras_dp needs Keras on TensorFlow. Set KERAS_BACKEND=tensorflow")
    assert last.endswith(f"Received: backend 'jax'{reason}")


@pytest.mark.processes
def test_importing_the_package_changes_nothing_and_reads_no_command_line():
    """It once left out all names in a script called keras-dp.py, failed without a command line, and patched Keras.

    A module that measured PyTorch once chose it as Keras's backend for all processes that its importer started.
    """
    names = [module.name for module in pkgutil.walk_packages(keras_dp.__path__, "keras_dp.") if "__main__" not in module.name]
    assert len(names) > 200
    script = f"""
import importlib, os, sys
import keras_dp
assert "tensorflow" not in sys.modules
sys.argv = []
import logging, keras
from keras.src.models import cloning
from keras.src.saving import saving_lib
before = dict(vars(cloning)), dict(vars(saving_lib))
keras_dp.DataParallelModel
assert before == (vars(cloning), vars(saving_lib))
assert logging.getLogger("keras_dp").handlers == [] and logging.getLogger("keras_dp").level == logging.NOTSET
before = dict(os.environ), list(sys.argv), list(sys.path)
for name in {names}:
    importlib.import_module(name)
assert (dict(os.environ), sys.argv, sys.path) == before
"""
    result = run_in_new_process(script)
    assert result.returncode == 0, result.stderr


@pytest.mark.processes
def test_a_closed_pipe_ends_a_command_without_a_traceback():
    """As in `keras-dp plan ... | head -1`."""
    script = """
import types
from keras_dp import cli

cli.COMMANDS = {"plan": types.SimpleNamespace(add_arguments=lambda parser: None, run=lambda options: print("a line") or 0)}
raise SystemExit(cli.main(["plan"]))
"""
    read, write = os.pipe()
    os.close(read)
    process = run_in_new_process(script, stdout=write)
    os.close(write)
    assert (process.returncode, process.stderr) == (1, "")


@pytest.mark.processes
def test_the_version_is_that_of_the_package_and_its_command():
    assert keras_dp.__version__ == metadata.version("keras_dp")
    assert f"## {keras_dp.__version__}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    said = subprocess.run([sys.executable, "-m", "keras_dp", "--version"], stdout=subprocess.PIPE, text=True, check=True).stdout
    assert said.startswith(f"keras_dp {keras_dp.__version__} with Keras ")


def test_what_the_package_says_of_itself():
    said = metadata.metadata("keras_dp")
    assert {"Author", "Keywords", "Classifier", "Project-URL"} <= set(said)
    assert "Programming Language :: Python :: 3.13" in said.get_all("Classifier")
    links = re.findall(r"\]\(([^)]+)\)", said["Description"])
    assert len(links) > 5
    assert all(link.startswith("https://") for link in links)


def test_links_lead_somewhere():
    pages = [ROOT / "README.md", ROOT / "SECURITY.md", ROOT / "examples" / "README.md", *(ROOT / "docs").rglob("*.md")]
    targets = [(page, to) for page in pages for to in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text(encoding="utf-8"))]
    # Where the package is installed elsewhere, its pages for developers are not there.
    is_here = (ROOT / "keras_dp").exists()
    targets = [(page, to) for page, to in targets if is_here or "../keras_dp/" not in to]
    assert [(page, to) for page, to in targets if not to.startswith("http") and not (page.parent / to).exists()] == []


def test_tests_on_cpus_know_all_that_asks_whether_towers_are_gpus():
    """On GPUs, batches once went another way by default, and gave other results, which no test on CPUs saw.

    The way "gpus" of ways_of_wrapping.py answers yes for all modules that ask. Commands and predictions ask about the machine.
    """
    sources = {path.relative_to(PACKAGE).as_posix(): path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py")}
    asking = {name for name, source in sources.items() if re.search(r"(?<!def )are_gpus\(\w", source)}
    assert asking - {"devices/available.py"} == {
        Path(module.__file__).relative_to(PACKAGE).as_posix() for module in ways_of_wrapping.DEFAULTS_OF_GPUS
    }
    otherwise = {name for name, source in sources.items() if re.search(r'"GPU" (in|==)|== "GPU"|startswith\("GPU"', source)}
    of_the_machine = {name for name in otherwise if name.startswith(("cli/", "gpu_model/", "devices/"))}
    # Collectives of the same device of each worker have a key of their own.
    assert otherwise - of_the_machine == {"workers/collectives.py"}


@pytest.mark.processes
def test_imported_once_more(tmp_path):
    """After a purge of sys.modules, as in a notebook, gradients use the sums of the module that is imported again."""
    script = """
import sys
import keras, numpy as np
import keras_dp
keras_dp.use_logical_cpus(2)

def trained(keras_dp):
    keras.utils.set_random_seed(0)
    layers = keras.layers
    model = keras.Sequential([keras.Input((3,)), layers.Dense(2), layers.BatchNormalization(), layers.Dense(1)])
    parallel = keras_dp.DataParallelModel(model) if keras_dp else model
    parallel.compile("sgd", "mse")
    parallel.fit(np.sin(np.arange(15.0)).reshape(5, 3), np.cos(np.arange(5.0)), epochs=3, verbose=0)
    return np.concatenate([value.ravel() for value in model.get_weights()])

weights = [trained(None), trained(keras_dp)]
for name in [name for name in sys.modules if name.partition(".")[0] == "keras_dp"]:
    del sys.modules[name]
import keras_dp as again
assert again is not keras_dp
print(np.ptp([*weights, trained(again)], axis=0).max())
"""
    (tmp_path / "script.py").write_text(script)
    assert float(output_of(tmp_path / "script.py").splitlines()[-1]) < 1e-5
