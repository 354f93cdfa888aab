"""What docs/security.md says of trust: nothing is unpickled or evaluated, and files with code in them are refused."""

import ast
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import keras
import numpy as np
import pytest
from keras import layers

import keras_dp

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "security.md").read_text(encoding="utf-8")
PROGRAMS = [*Path(keras_dp.__file__).parent.rglob("*.py"), *(ROOT / "examples").rglob("*.py")]

RUNNING = {"eval", "exec", "compile", "__import__", "popen", "run_path", "run_module", "enable_unsafe_deserialization"}
UNPICKLING = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib", "yaml"}


def risks_in(program):
    """Yields the name of each call or import in a program that could run what it reads."""
    for node in ast.walk(ast.parse(program)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [getattr(node, "module", None) or "", *(alias.name for alias in node.names)]
            yield from UNPICKLING & {name.partition(".")[0] for name in names}
        if not isinstance(node, ast.Call):
            continue
        name = getattr(node.func, "id", None) or getattr(node.func, "attr", None)
        # A method `compile`, as of models and of regular expressions, compiles no text.
        if name in RUNNING and (isinstance(node.func, ast.Name) or name != "compile"):
            yield name
        if name == "import_module" or ast.unparse(node.func) == "os.system":
            yield name
        given = {keyword.arg: getattr(keyword.value, "value", None) for keyword in node.keywords}
        yield from (
            word for word, value in (("allow_pickle", True), ("safe_mode", False), ("shell", True)) if given.get(word) is value
        )


def test_no_program_runs_what_it_reads():
    assert len(PROGRAMS) > 150
    found = {(path.name, risk) for path in PROGRAMS for risk in risks_in(path.read_text(encoding="utf-8"))}
    assert found == {("models.py", "import_module")}, "the command line imports what the user names"


RISKS = {
    "import pickle; from yaml import load; eval(text); compile(text, '', 'exec')": ["pickle", "yaml", "eval", "compile"],
    "np.load(path, allow_pickle=True); subprocess.run(text, shell=True)": ["allow_pickle", "shell"],
    "os.system(text); keras.saving.load_model(path, safe_mode=False)": ["system", "safe_mode"],
    "keras.config.enable_unsafe_deserialization()": ["enable_unsafe_deserialization"],
    "importlib.import_module(text)": ["import_module"],
    "model.compile('sgd'); re.compile('a'); json.loads(text); np.load(path)": [],
}


def test_a_program_that_does_is_found():
    assert {program: list(risks_in(program)) for program in RISKS} == RISKS


def wrapped():
    model = keras.Sequential([keras.Input((3,)), layers.Lambda(lambda x: 2 * x, output_shape=(3,)), layers.Dense(2)])
    parallel = keras_dp.DataParallelModel(model, devices=2)
    parallel.compile("sgd", "mse")
    return parallel


def test_a_saved_model_with_code_in_it_is_refused_unless_the_user_allows_it(tmp_path):
    parallel = wrapped()
    parallel.save(tmp_path / "model.keras")
    with pytest.raises(ValueError, match=r"[Ll]ambda.*safe_mode=False"):
        keras.saving.load_model(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras", safe_mode=False)
    np.testing.assert_allclose(loaded.predict(np.ones((4, 3)), verbose=0), parallel.predict(np.ones((4, 3)), verbose=0))


def test_a_backup_of_such_a_model_holds_its_numbers_alone(tmp_path):
    """A callback that restores a wrapper loads weights, and no code: it needs no `safe_mode`."""

    def fitted(epochs):
        parallel = wrapped()
        callback = keras.callbacks.BackupAndRestore(tmp_path / "backup", delete_checkpoint=False)
        parallel.fit(np.ones((8, 3)), np.ones((8, 2)), batch_size=4, epochs=epochs, verbose=0, callbacks=[callback])
        return parallel

    weights = fitted(1).get_weights()
    for one, other in zip(weights, fitted(1).get_weights(), strict=True):
        np.testing.assert_array_equal(one, other)
    files = [path.name for path in tmp_path.rglob("*") if path.is_file()]
    assert files
    assert not [name for name in files if name.endswith(".keras")]


def test_a_configuration_with_code_in_it_is_refused(tmp_path):
    parallel = wrapped()
    config = keras.saving.serialize_keras_object(parallel.inner_model)
    with pytest.raises(ValueError, match=r"safe_mode=False"):
        keras.saving.deserialize_keras_object(config)
    function = config["config"]["layers"][1]["config"]["function"]["config"]
    harmful = {"optimizer": {"class_name": "__lambda__", "config": function}}
    with pytest.raises(ValueError, match=r"safe"):
        parallel.compile_from_config(harmful)


def test_the_table_of_licenses_has_what_an_installation_brings():
    command = [sys.executable, str(ROOT / ".ci" / "dependencies"), "--licenses"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    rows = re.compile(r"^\| ([\w-]+) \| (\d[\w.]*) \| (.+) \|$", re.MULTILINE)
    shown, installed = ({name: found for name, *found in rows.findall(text)} for text in (PAGE, printed))
    direct = {re.split(r"[<>=;\[ ]", line)[0] for line in metadata.requires("keras_dp") if "extra ==" not in line}
    assert direct == {"keras", "tensorflow", "numpy", "grpcio", "packaging", "rich"}
    assert direct <= installed.keys() & shown.keys()
    same = [name for name in installed if name in shown and shown[name][0] == installed[name][0]]
    assert {name: shown[name] for name in same} == {name: installed[name] for name in same}
    if shown["tensorflow"] == installed["tensorflow"]:
        assert installed.keys() == shown.keys(), "python .ci/dependencies --licenses prints the table of docs/security.md"


def test_what_checks_each_commit_has_exact_versions():
    dev = re.search(r"^dev = \[(.*?)^\]", (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)[1]
    for tool in ("ruff", "mypy", "import-linter"):
        lines = re.findall(rf'"{tool}\b([^";]*)', dev)
        assert lines
        assert all(re.fullmatch(r"==[\d.]+", line) for line in lines), lines
