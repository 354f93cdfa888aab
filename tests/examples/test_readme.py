"""README.md shows one device's losses, fits a phone, and states figures of the pages that it links to."""

import re
from pathlib import Path

import pytest
from page_programs import missing, programs, run

ROOT = Path(__file__).parents[2]
README, BENCHMARKS, AUDIT = (
    (ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "docs/benchmarks.md", "docs/gpu_audit.md")
)
FIGURE = r"(\d\.\d\d)"


@pytest.mark.promise
@pytest.mark.processes
def test_plain_keras_prints_what_is_shown(tmp_path):
    """test_pages.py runs the program as it stands."""
    code, shown = programs(README)
    plain = code["page.py"].replace("keras_dp.DataParallelModel(model)", "model")
    assert plain != code["page.py"]
    (tmp_path / "plain.py").write_text(plain)
    announced, *lines = shown["page.py"]
    output = run(tmp_path, "plain.py")
    assert announced.startswith("keras_dp: 2 towers")
    assert announced not in output
    assert missing(lines, output) is None, output


def test_it_fits_a_phone_and_takes_two_minutes():
    code = [line for block in re.findall(r"```\w+\n(.*?)```", README, re.DOTALL) for line in block.splitlines()]
    assert [line for line in code if len(line) > 72] == []
    rows = re.findall(r"^\|.*\|$", README, re.MULTILINE)
    assert max(row.count("|") for row in rows) <= 4, "tables have at most three columns"
    prose = re.sub(r"```.*?```|\]\(.*?\)|^\|[-|]+$", " ", README, flags=re.DOTALL | re.MULTILINE)
    assert len(prose.split()) < 750


def test_the_speed_is_that_of_the_benchmarks():
    """Each table of whole steps has a row for MirroredStrategy, with keras_dp's time over its time."""
    steps = BENCHMARKS.split("## Step time")[1].split("\n## ")[0]
    ratios = re.findall(rf"^\| (?:MirroredStrategy|mirrored) \|.*?{FIGURE}(?:\*\*)? \(", steps, re.MULTILINE)
    words = ["no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
    said = f"{min(ratios)} to {max(ratios)} of MirroredStrategy's time in the [{words[len(ratios)]} cases"
    assert said in " ".join(README.split())


def test_the_expected_speed_up_is_that_of_the_simulation():
    table = re.search(r"<!-- scaling -->(.*?)<!-- end of scaling -->", AUDIT, re.DOTALL)[1]
    rows = re.findall(r"^\| (?:resnet20|unet|transf).* \| yes \| .* \| GPU:0 \| (.*?) \|", table, re.MULTILINE)
    assert len(rows) == 9
    two = [float(end) for row in rows for end in row.split(" to ")]
    assert f"expects {min(two):.1f} to {max(two):.1f} times the speed" in " ".join(README.replace(">", "").split())


def test_the_time_beside_mirrored_strategy_is_that_of_the_simulation():
    table = re.search(r"<!-- mirrored -->(.*?)<!-- end of mirrored -->", AUDIT, re.DOTALL)[1]
    rows = [[cell.strip() for cell in row.strip("|").split("|")] for row in re.findall(r"^\| .*A100.*\|$", table, re.MULTILINE)]
    of_gpus = {count: [row[10].split(" to ")[-1] for row in rows if row[2] == count] for count in ("2", "8")}
    assert max(map(float, of_gpus["2"])) < 1.0
    said = re.search(r"up to (\S+) of the time on eight", re.sub(r"\s+", " ", README))[1]
    assert max(of_gpus["8"], key=float) == said
