"""The commands of docs/your_script.md train, go on with other devices, and end where one device does."""

import re
from pathlib import Path

import pytest
from page_programs import FENCE, commands, missing, programs, run

PAGE = (Path(__file__).parents[2] / "docs" / "your_script.md").read_text(encoding="utf-8")


def figures(text):
    """Returns accuracy and loss, of training and of validation, for each epoch."""
    epochs = re.findall(r"accuracy: ([\d.]+) - loss: ([\d.]+) - val_accuracy: ([\d.]+) - val_loss: ([\d.]+)", text)
    return [[float(figure) for figure in epoch] for epoch in epochs]


@pytest.mark.processes
def test_the_script_goes_on_with_other_devices_and_is_served(tmp_path):
    for name, program in programs(PAGE)[0].items():
        (tmp_path / name).write_text(program)
    consoles = [fence[3] for fence in FENCE.finditer(PAGE) if fence[2] == "console"]
    outputs = []
    for command, shown in (found for console in consoles for found in commands(console)):
        outputs.append(run(tmp_path, *command.split()[1:]))
        assert [line for line in shown.splitlines() if missing([line], outputs[-1])] == [], outputs[-1]
    assert len(outputs) == 3

    other = tmp_path / "one device"
    other.mkdir()
    expected = figures(run(other, "../train.py", "--devices", "1"))
    assert len(expected) == 6
    for shown, epoch in zip([*figures(outputs[0]), *figures(outputs[1])], expected, strict=True):
        assert shown == pytest.approx(epoch, abs=2e-3)
