"""Whatever environment, command line or file is read, it is understood, or refused in a sentence, and nothing hangs."""

import contextlib
import functools
import io
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from keras_dp.cli import COMMANDS, main, runs
from keras_dp.cli.bench import plot
from keras_dp.cli.check import command as check
from keras_dp.cli.launch import command as launch
from keras_dp.cli.plan import command as plan
from keras_dp.gpu_model import own_gpus
from keras_dp.workers.cluster import find_cluster

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
from data import archive

sys.path.pop(0)

pytestmark = pytest.mark.timeout(300)


FUZZED = settings(
    max_examples=100,
    deadline=10_000,  # milliseconds: an example that hangs fails
    database=None,
    derandomize=True,
    phases=(Phase.generate, Phase.shrink),
    suppress_health_check=list(HealthCheck),
)
NUMBERS = st.one_of(
    st.integers(-2, 5), st.sampled_from([10**400, -(10**30), 2**63, 1e308, float("nan"), float("inf"), -0.0]), st.floats()
)
LEAVES = st.one_of(st.none(), st.booleans(), NUMBERS, st.text(max_size=8))
ANY_JSON = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3), max_leaves=6
)
NESTED_DEEPLY = st.sampled_from(["[" * 100_000, '{"a":' * 100_000, "[" * 100_000 + "]" * 100_000])


def places(value, path=()):
    """Yields the path of each value in nested lists and dictionaries."""
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield from places(inner, (*path, key))


@st.composite
def damaged(draw, valid):
    """Draws JSON with some values replaced, left out or added, as text."""
    whole = {"": json.loads(json.dumps(valid))}
    for _ in range(draw(st.integers(1, 3))):
        *above, last = draw(st.sampled_from(sorted(places(whole[""], ("",)), key=repr)))
        inside = functools.reduce(lambda value, key: value[key], above, whole)
        how = draw(st.sampled_from(["replace", "remove", "add"]))
        if how == "remove" and above:
            del inside[last]
        elif how == "add" and isinstance(inside[last], dict):
            inside[last][draw(st.text(max_size=8))] = draw(ANY_JSON)
        else:
            inside[last] = draw(ANY_JSON)
    return json.dumps(whole[""])


def texts_like(valid):
    """Returns texts that are close to JSON of a valid value, or far from it."""
    return st.one_of(damaged(valid), ANY_JSON.map(json.dumps), st.text(), NESTED_DEEPLY)


def of_an_environment(texts):
    """Leaves out what no environment variable and no argument can hold."""
    return texts.map(lambda text: text.encode("utf-8", "replace").decode().replace("\0", "")[:100_000])


@contextlib.contextmanager
def refused_with(beginning):
    """Lets a ValueError pass whose message has this text in it, and a sentence."""
    refusal = None
    try:
        yield
    except ValueError as error:
        refusal = str(error)
    assert refusal is None or (beginning in refusal and len(refusal.split()) > 4), refusal


def find_in(variables):
    kept = {name: value for name, value in os.environ.items() if name != "TF_CONFIG" and not name.startswith("SLURM")}
    with mock.patch.dict(os.environ, kept | variables, clear=True):
        cluster = find_cluster()
    if cluster is not None:
        assert 0 <= cluster.index < len(cluster.addresses) == len(set(cluster.addresses))
        assert all(re.fullmatch(r"\S+:\d+", address) for address in cluster.addresses)
    return cluster


TF_CONFIG = {"cluster": {"chief": ["a:1"], "worker": ["b:2", "[::1]:3"]}, "task": {"type": "worker", "index": 1}}


@FUZZED
@given(of_an_environment(texts_like(TF_CONFIG)))
def test_tf_config(text):
    with refused_with("TF_CONFIG"):
        find_in({"TF_CONFIG": text})


SLURM = {
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_STEP_NODELIST": "node[1-2]",
    "SLURM_STEP_TASKS_PER_NODE": "2,1",
    "SLURM_PROCID": "0",
    "SLURMD_NODENAME": "node1",
    "SLURM_LOCALID": "1",
}
# Lists of so many nodes would fill the memory.
OF_SLURM = st.one_of(
    st.from_regex(r"([a-z]{0,2}(\[[0-9]{1,2}(-[0-9]{1,2})?\])?,?){0,3}", fullmatch=True),
    st.from_regex(r"[0-9]{1,2}(\(x[0-9]{1,2}\))?", fullmatch=True),
    st.sampled_from(["", "-1", "9" * 5000, "node[1-99999999999]", "1(x99999999999)", "n[0-65535],m[0-65535]", "node[2-1]"]),
    of_an_environment(st.text(max_size=12)),
)


@FUZZED
@given(st.dictionaries(st.sampled_from(sorted(SLURM)), st.none() | OF_SLURM, min_size=1))
def test_slurms_variables(changed):
    with refused_with("Slurm's variables do not describe this step"):
        find_in({name: value for name, value in (SLURM | changed).items() if value is not None})


def called(*arguments):
    """Returns the exit code and what a command prints; nothing is measured or started."""
    survey = runs.Survey({**MACHINE}, 0, 64)
    fails = mock.Mock(side_effect=runs.RunFailedError("nothing is measured"))
    replaced = [
        (runs, "survey_in_new_process", lambda *_, **__: survey),
        (runs, "measure_in_new_process", fails),
        (plan, "plan_in_new_process", fails),
        (check, "answers", lambda *_, **__: ()),
        (launch, "_run_workers", lambda *_, **__: (None, None)),
        (plot, "write_figure", mock.Mock()),
    ]
    out, err = io.StringIO(), io.StringIO()
    with contextlib.ExitStack() as stack:
        for module, name, function in replaced:
            stack.enter_context(mock.patch.object(module, name, function))
        stack.enter_context(contextlib.redirect_stdout(out))
        stack.enter_context(contextlib.redirect_stderr(err))
        try:
            code = main([*map(str, arguments)])
        except SystemExit as end:
            code = end.code
            assert code in (0, 2)
            assert code == 0 or re.search(r"^keras-dp.*: error: .+", err.getvalue(), re.MULTILINE)
    return code, out.getvalue(), err.getvalue()


MACHINE = {"processor": "one", "cores": 2, "gpus": []} | dict.fromkeys(("python", "keras", "tensorflow", "keras_dp"), "1.0")
VALUES = st.one_of(
    st.sampled_from(["1", "0", "-1", "1,2", "1,,2", "9" * 5000, "1e999", "nan", "٣", "²", "", "-", "--", "=", "%", "%s"]),
    st.sampled_from(["a:b", ".a:b", ":", "a:", "mlp", "a..b:c", "A100", "none", "sharded", "GPU:0", "CPU:-1", "24GB"]),
    st.sampled_from(["[::1]:2222", "alpha,beta", "alpha:70000", "a:b:c", "script.py", "no.json", "strong", "nvlink"]),
    # Without separators of folders: options name files to write.
    of_an_environment(st.text(max_size=8)).map(lambda text: text.replace("/", "")),
)


def command_lines(name):
    options = re.findall(r"(?<!\w)--?[a-z][\w-]*", called(name, "--help")[1])
    pair = st.tuples(st.sampled_from(sorted(set(options))), VALUES)
    return st.lists(st.one_of(pair, pair.map("=".join).map(lambda text: (text,)), VALUES.map(lambda text: (text,))), max_size=4)


@pytest.mark.parametrize("name", COMMANDS)
def test_arguments(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "script.py").touch()

    @FUZZED
    @given(command_lines(name))
    def are_understood(words):
        called(name, *(word for together in words for word in together))

    are_understood()


def test_more_workers_than_there_are_ports(tmp_path):
    (tmp_path / "script.py").touch()
    with mock.patch("socket.socket", side_effect=OSError(24, "Too many open files")):
        code, _, err = called("launch", "--workers", 60_000, tmp_path / "script.py")
    assert (code, "--workers: 60000 ports cannot be had at once: [Errno 24] Too many open files" in err) == (2, True)


@pytest.mark.processes
def test_arguments_that_are_not_utf_8_are_printed_as_they_were_given():
    command = [sys.executable, "-m", "keras_dp", "launch", "--hosts", "alpha,beta", "train.py", b"\xff"]
    printed = subprocess.run(command, capture_output=True, env=os.environ | {"PYTHONIOENCODING": "utf-8:strict"})
    assert printed.returncode == 0, printed.stderr
    assert b"python train.py '\xff'" in printed.stdout


@contextlib.contextmanager
def file_of(content):
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "file.json"
        path.write_bytes(content if isinstance(content, bytes) else content.encode("utf-8", "replace"))
        yield path


GPU = {"name": "Mine", "memory_gigabytes": 48, "memory_gigabytes_per_second": 864, "teraflops": 38.7, "launch_microseconds": 4}


@FUZZED
@given(texts_like(GPU))
def test_the_numbers_of_a_gpu(text):
    with file_of(text) as path:
        called("plan", "--gpu", path)
        with refused_with(str(path)):
            machine = own_gpus.read(str(path)).machine()
            assert 0 < machine.processors[0].matrix_flops < float("inf")


CHECK = [
    {"name": "devices"},
    {"name": "copies", "verdict": "pass", "data": {"a": {"microseconds": 10.0, "gigabytes_per_second": 30.0}}},
]


@FUZZED
@given(texts_like(CHECK))
def test_the_constants_of_check(text):
    with file_of(text) as path:
        called("plan", "--constants", path)


def test_what_is_damaged_above_is_understood():
    assert find_in({"TF_CONFIG": json.dumps(TF_CONFIG)}).index == 2
    assert find_in(SLURM).index == 1
    with file_of(json.dumps(GPU)) as gpu, file_of(json.dumps(CHECK)) as constants:
        assert own_gpus.read(str(gpu)).machine().processors[0].launch_seconds == 4e-6
        assert "10 µs and 30 GB/s" in called("plan", "--constants", constants)[1]


def npz_of(arrays):
    file = io.BytesIO()
    np.savez(file, **arrays)
    return file.getvalue()


IMAGES = {
    "x_train": np.zeros((3, 4, 4), "uint8"),
    "y_train": np.zeros(3, "uint8"),
    "x_test": np.zeros((2, 4, 4), "uint8"),
    "y_test": np.zeros((2, 1), "int64"),
}


class RunsWhenUnpickled:
    def __reduce__(self):
        return exec, ("import os; os.environ['KERAS_DP_WAS_RUN'] = '1'",)


def test_archives_of_images():
    content = npz_of(IMAGES)
    with file_of(content) as path:
        assert archive.read(path)[1][0].shape == (2, 4, 4)
    wrong = [npz_of({**IMAGES, "x_train": array}) for array in (np.zeros(()), np.zeros((2, 4, 4), "complex64"))]
    for damaged_content in (*wrong, content[: len(content) // 2], content[:-1], b""):
        with file_of(damaged_content) as path, pytest.raises(ValueError, match=re.escape(str(path))):
            archive.read(path)


def test_an_archive_is_not_unpickled():
    content = npz_of({**IMAGES, "x_train": np.array([RunsWhenUnpickled()], object)})
    with file_of(content) as path, pytest.raises(ValueError, match="cannot be read as an npz file.*allow_pickle=False"):
        archive.read(path)
    assert "KERAS_DP_WAS_RUN" not in os.environ
    try:
        np.load(io.BytesIO(content), allow_pickle=True)["x_train"]
        assert os.environ["KERAS_DP_WAS_RUN"] == "1", "the file would have run a program"
    finally:
        os.environ.pop("KERAS_DP_WAS_RUN", None)
