"""docs/gpu.md shows speed-ups of docs/gpu_audit.md, which has the places where `make gpu-audit WRITE=1` writes its tables."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE, AUDIT = ((ROOT / "docs" / name).read_text(encoding="utf-8") for name in ("gpu.md", "gpu_audit.md"))
NAMES = {"embeddings of 1": "embeddings"}


def cells(row):
    return [cell.strip() for cell in row.strip("|").split("|")]


def simulated():
    """Returns the speed-ups on 2, 4 and 8 GPUs of each placement, for each model and machine."""
    table = re.search(r"<!-- scaling -->(.*?)<!-- end of scaling -->", AUDIT, re.DOTALL)[1]
    found = {}
    for model, machine, _, _, *speedups, _, _ in map(cells, re.findall(r"^\| (?!model).*\|$", table, re.MULTILINE)):
        found.setdefault((model.split(",")[0], machine), []).append(speedups)
    return found


def test_the_best_placements_are_those_of_the_simulation():
    rows = [cells(row) for row in re.findall(r"^\| .*, NVLink \|.*|^\| .*, PCIe \|.*", PAGE, re.MULTILINE)]
    assert len(rows) > 5
    placements = {(model, machine[: machine.rindex(" ")]): speedups for (model, machine), speedups in simulated().items()}
    for model, machine, *shown in rows:
        name = model.split(",")[0].lower().replace("-", "")
        speedups = placements[NAMES.get(name, name), machine]
        assert shown == [
            max(column, key=lambda figure: 0.0 if figure == "-" else float(figure)) for column in zip(*speedups, strict=True)
        ]


def test_the_tables_have_their_places():
    program = (ROOT / "examples" / "benchmarks" / "gpu_audit.py").read_text(encoding="utf-8")
    assert 'PAGE = DIRECTORY.parents[1] / "docs" / "gpu_audit.md"' in program
    for name in ("audit", "scaling", "mirrored", "check"):
        assert f'show("{name}", ' in program
        assert AUDIT.count(f"<!-- {name} -->\n") == AUDIT.count(f"<!-- end of {name} -->") == 1, name


def test_when_one_gpu_is_better_is_told_with_figures_of_the_simulation():
    page = " ".join((ROOT / "docs" / "should_i_use_it.md").read_text(encoding="utf-8").split())
    said = re.search(r"two A100s for an MLP.*?\((\S+) of .*?embeddings \((\S+)\).*? and (\S+) for a ResNet-20", page).groups()
    two = [simulated()[model, "A100, NVLink 3"][0][0] for model in ("mlp", "embeddings", "resnet20")]
    assert [float(figure) for figure in said] == [float(two[0]), float(two[1]), round(float(two[2]), 1)]
