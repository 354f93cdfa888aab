"""The pages say what the package has: its public names, files, commands, variables, messages, versions, tests and figures."""

import argparse
import ast
import doctest
import re
import shlex
import sys
from importlib import metadata
from pathlib import Path
from types import ModuleType

import pytest

import keras_dp
from keras_dp import cli
from keras_dp.keras_internals import versions

ROOT = Path(__file__).parents[2]
PACKAGE = Path(keras_dp.__file__).parent
MODULES = {path: ast.parse(path.read_text(encoding="utf-8")) for path in PACKAGE.rglob("*.py")}
ECOSYSTEM = ROOT / "tests" / "ecosystem"


def text_of(name):
    return (ROOT / name).read_text(encoding="utf-8")


def words_of(name):
    return " ".join(text_of(name).split())


# docs/api.md
PUBLIC_MODULES = [keras_dp, keras_dp.callbacks, keras_dp.optimizers, keras_dp.schedules]
PUBLIC = {f"{module.__name__}.{name}": getattr(module, name) for module in PUBLIC_MODULES for name in module.__all__}


def test_every_public_name_is_documented_with_an_example():
    modules = {name for name, value in PUBLIC.items() if isinstance(value, ModuleType)}
    assert modules == {module.__name__ for module in PUBLIC_MODULES[1:]}
    shown = re.findall(r"^\.\. auto\w+:: (.+)$", text_of("docs/api.md"), re.MULTILINE)
    assert sorted(shown) == sorted(PUBLIC.keys() - modules)
    parser = doctest.DocTestParser()
    assert [name for name in shown if not parser.get_examples(PUBLIC[name].__doc__)] == []


# docs/architecture.md
def lines_of(folder, depth=0):
    """Returns a line for each module and package in a folder: its name and the first line of its docstring."""
    parts = [path for path in folder.iterdir() if (path.suffix == ".py" and path.stem != "__init__") or is_package(path)]
    for path in sorted(parts, key=lambda path: (path.is_dir(), path.name)):
        docstring = ast.get_docstring(MODULES[path / "__init__.py" if path.is_dir() else path])
        name = "  " * depth + path.name + ("/" if path.is_dir() else "")
        yield f"{name:<28} {docstring.splitlines()[0]}"
        if path.is_dir():
            yield from lines_of(path, depth + 1)


def is_package(path):
    return (path / "__init__.py").exists()


def test_the_architecture_is_that_of_the_package():
    """Its tree has a line for each file, its text names files that are there, and large packages have an index."""
    page = text_of("docs/architecture.md")
    (tree,) = re.findall(r"\n\n```\n(.*?)```", page, re.DOTALL)
    assert tree.splitlines() == list(lines_of(PACKAGE))
    named = set(re.findall(r"`([\w/]+(?:\.py|\.toml|/))`", page.replace(tree, "")))
    assert len(named) > 20
    assert {name for name in named if not (PACKAGE / name).exists() and not (ROOT / name).exists()} == set()
    large = [path for path in PACKAGE.rglob("*") if is_package(path) and len(list(path.glob("*.py"))) > 6]
    assert len(large) > 4
    assert [path.name for path in large if not (path / "README.md").exists()] == []


def test_folders_that_are_collected_together_share_one_conftest():
    """Collecting docstrings, pytest takes a second conftest.py for the first, and stops after all tests have run."""
    with_settings_of_their_own = {"ecosystem", "host"}
    folders = {path.parent.relative_to(ROOT / "tests").as_posix() for path in (ROOT / "tests").rglob("conftest.py")}
    assert folders == {"."} | with_settings_of_their_own


# docs/command_line.md
COMMANDS = text_of("docs/command_line.md")


@pytest.mark.skipif(sys.version_info >= (3, 13), reason="Python 3.13 writes two names of an option in another way")
@pytest.mark.parametrize("command", [None, *cli.COMMANDS])
def test_help_is_on_the_page(command, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        cli.main([command, "--help"] if command else ["--help"])
    shown = dict(re.findall(r"^## (?:keras-dp )?(.+?)$.*?^```text\n(.*?)^```", COMMANDS, re.MULTILINE | re.DOTALL))
    said = [line.rstrip() for line in capsys.readouterr().out.rstrip().splitlines()]
    assert shown[command or "All commands"].splitlines() == said, "Copy the output of COLUMNS=80 keras-dp ... --help."


def test_examples_of_commands_are_understood():
    examples = re.findall(r"^```sh\nkeras-dp (.*)\n```", COMMANDS, re.MULTILINE)
    assert {example.split()[0] for example in examples} == set(cli.COMMANDS)
    for example in examples:
        name, *arguments = shlex.split(example)
        parser = argparse.ArgumentParser(exit_on_error=False)
        cli.COMMANDS[name].add_arguments(parser)
        parser.parse_args(arguments)


# docs/environment.md
def variables_in(module):
    """Returns the names of environment variables among the texts of a module: upper-case words of no other use."""
    nodes = list(ast.walk(module))
    others = {id(node.value) for node in nodes if isinstance(node, ast.keyword) and node.arg == "metavar"}
    others |= {
        id(node.args[0]) for node in nodes if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(".startswith")
    }
    texts = {node.value for node in nodes if isinstance(node, ast.Constant) and id(node) not in others}
    return {text for text in texts if isinstance(text, str) and re.fullmatch(r"[A-Z][A-Z_]{3,}|no_\w*proxy", text)}


def test_every_environment_variable_has_a_row():
    used = [variables_in(module) for module in MODULES.values() if "os.environ" in ast.unparse(module)]
    ours, of_others = text_of("docs/environment.md").split("## Of Keras and TensorFlow")
    assert set(re.findall(r"^\| `(\w+)", ours, re.MULTILINE)) == set.union(*used)
    assert "`TF_CPP_MIN_LOG_LEVEL`" in of_others
    source = 'os.environ["RANK"], name.startswith("SLURM"), add_argument("--x", metavar="SECONDS"), "Text", "no_grpc_proxy"'
    assert variables_in(ast.parse(source)) == {"RANK", "no_grpc_proxy"}


# docs/messages.md
TELLING = ("debug", "info", "warning", "error", "exception", "warn", "_warn_once")


def pattern_of(node):
    """Returns a pattern of a text, with any words where the program puts a value; None for what is no text."""
    if isinstance(node, ast.JoinedStr):
        parts = [part.value if isinstance(part, ast.Constant) else None for part in node.values]
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        parts = [node.value]
    else:
        return None
    return "".join(".*" if part is None else re.sub(r"%[-.\d]*[sdgr]", ".*", re.escape(part)) for part in parts)


def test_every_message_is_on_the_page_and_no_other():
    blocks = re.findall(r"^```text\n(.*?)^```", text_of("docs/messages.md"), re.MULTILINE | re.DOTALL)
    shown = [" ".join(block.split()) for block in blocks]
    nodes = [node for module in MODULES.values() for node in ast.walk(module)]
    calls = [node for node in nodes if isinstance(node, ast.Call) and node.args]
    names = [(getattr(call.func, "attr", None) or getattr(call.func, "id", None), call.args[0]) for call in calls]
    told = [pattern for name, text in names if name in TELLING and (pattern := pattern_of(text)) is not None]
    assert len(told) > 15
    assert [message for message in told if not any(re.search(message, one) for one in shown)] == []
    # Other texts that are long enough to tell one message from another.
    long_ones = [pattern for pattern in map(pattern_of, nodes) if pattern and len(pattern.replace(".*", "")) > 20]
    of_package = re.compile("|".join([*told, *long_ones]))
    assert [one for one in shown if not of_package.search(one)] == []
    assert not of_package.search("The towers run with XLA: nothing to do.")


# README.md, docs/install.md, docs/versioning.md and CITATION.cff
def range_of(package):
    (major, oldest), (_, untested) = getattr(versions, package)
    return f"{major}.{oldest} to {major}.{untested - 1}"


@pytest.mark.parametrize("page", ["README.md", "docs/install.md"])
def test_pages_state_the_supported_versions(page):
    named = re.findall(r"Python :: 3\.(\d+)$", "\n".join(metadata.metadata("keras_dp").get_all("Classifier")), re.MULTILINE)
    pythons = sorted(map(int, named))
    assert f"Python 3.{pythons[0]} to 3.{pythons[-1]}, Keras {range_of('KERAS')}" in words_of(page)
    assert f"TensorFlow {range_of('TENSORFLOW')}" in words_of(page)


def test_the_tested_pairs_are_those_that_are_run():
    run = re.search(r'^pairs="(.*?)"', text_of(".ci/versions"), re.DOTALL | re.MULTILINE)[1]
    shown = re.findall(r"^\| (3\.\d+) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|$", text_of("docs/versioning.md"), re.MULTILINE)
    assert [" ".join(row) for row in shown] == run.splitlines()


def test_cuda_is_the_one_that_tensorflow_asks_for():
    asked = " ".join(metadata.requires("tensorflow"))
    for package, name in (("nvidia-cuda-runtime-cu12", "CUDA"), ("nvidia-cudnn-cu12", "cuDNN")):
        version = re.search(rf"{package}[^;]*?[>=]=(\d+\.\d+)", asked)[1]
        assert f"| {name} | {version}, from pip |" in words_of("docs/install.md")


def test_the_citation_is_of_this_version():
    assert f"\nversion: {keras_dp.__version__}\n" in text_of("CITATION.cff")
    assert f"license: {metadata.metadata('keras_dp')['License-Expression']}\n" in text_of("CITATION.cff")


# docs/works_with.md
def rows_of_tools():
    """Yields the file and the name of each test in the last column; a file without a name stands for all its tests."""
    for row in re.findall(r"^\| .*\| (.*) \|$", text_of("docs/works_with.md"), re.MULTILINE):
        if files := re.findall(r"(?:tests/parity/)?test_\w+\.py", row):
            (file,) = files
            for name in re.findall(r"\btest_\w+\b(?!\.py)", row) or [None]:
                yield ROOT / file if "/" in file else ECOSYSTEM / file, name


def test_every_tool_has_a_test_and_every_test_a_tool():
    rows = list(rows_of_tools())
    assert len(rows) > 20
    for path, name in rows:
        assert name is None or f"\ndef {name}(" in path.read_text(encoding="utf-8"), (path, name)
    assert {path for path, _ in rows if path.parent == ECOSYSTEM} == set(ECOSYSTEM.glob("test_*.py"))


# docs/gpu.md and docs/should_i_use_it.md show figures of docs/gpu_audit.md.
AUDIT = text_of("docs/gpu_audit.md")


def cells(row):
    return [cell.strip() for cell in row.strip("|").split("|")]


def simulated():
    """Returns the speed-ups on 2, 4 and 8 GPUs of each placement, for each model and machine, with and without XLA."""
    table = re.search(r"<!-- scaling -->(.*?)<!-- end of scaling -->", AUDIT, re.DOTALL)[1]
    found = {}
    for model, machine, xla, _, _, *speedups, _, _ in map(cells, re.findall(r"^\| (?!model).*\|$", table, re.MULTILINE)):
        found.setdefault((model.split(",")[0], machine, xla), []).append(speedups)
    return found


def test_the_best_placements_are_those_of_the_simulation():
    rows = [cells(row) for row in re.findall(r"^\| .*, (?:NVLink|PCIe) \|.*", text_of("docs/gpu.md"), re.MULTILINE)]
    assert len(rows) > 5
    placements = {
        (model, machine[: machine.rindex(" ")], xla): speedups for (model, machine, xla), speedups in simulated().items()
    }
    for model, machine, xla, *shown in rows:
        columns = zip(*placements[model.split(",")[0].lower().replace("-", ""), machine, xla], strict=True)
        assert shown == [max(column, key=middle) for column in columns]


def middle(figure):
    """Returns the middle of a range such as "1.25 to 1.50"."""
    ends = [float(end) for end in figure.split(" to ")]
    return (ends[0] + ends[-1]) / 2


def test_when_one_gpu_is_better_is_told_with_figures_of_the_simulation():
    page = words_of("docs/should_i_use_it.md")
    pattern = r"two A100s for an MLP.*?\((\S+ to \S+) of .*?embeddings \((\S+ to \S+)\).*? and (\S+ to \S+) for a ResNet-20"
    said = re.search(pattern, page).groups()
    assert list(said) == [simulated()[model, "A100, NVLink 3", "yes"][0][0] for model in ("mlp", "embeddings", "resnet20")]


def test_the_tables_have_the_places_where_the_audit_writes_them():
    program = text_of("examples/benchmarks/gpu_audit.py")
    assert 'PAGE = DIRECTORY.parents[1] / "docs" / "gpu_audit.md"' in program
    for name in ("audit", "scaling", "mirrored", "check"):
        assert f'show("{name}", ' in program
        assert AUDIT.count(f"<!-- {name} -->\n") == AUDIT.count(f"<!-- end of {name} -->") == 1, name
