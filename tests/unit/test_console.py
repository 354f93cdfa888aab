"""Messages are shown where logging is not set up; otherwise the program's logging handles them."""

import pytest
from forked_processes import output_of

SAYS = "2 towers on CPU:0 and CPU:1; global batch 32, 16 rows a tower"

SCRIPT = """
{setup}
import io, sys
import keras, numpy as np, keras_dp
sys.stdout = io.StringIO()
keras_dp.use_logical_cpus(2)
parallel = keras_dp.DataParallelModel(keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)]))
parallel.compile("sgd", "mse")
for verbose in {verbose}:
    print("verbose", verbose, file=sys.stderr)
    parallel.fit(np.ones((40, 4)), np.ones(40), verbose=verbose)
assert "tower" not in sys.stdout.getvalue()
"""


@pytest.mark.processes
@pytest.mark.parametrize(
    ("setup", "verbose", "expected"),
    [
        ("", [0, "auto", 2], ["verbose 0", "verbose auto", f"keras_dp: {SAYS}", "verbose 2"]),
        ("import logging; logging.basicConfig()", [2], ["verbose 2", f"INFO:keras_dp:{SAYS}"]),
        ("import logging; logging.getLogger('keras_dp').setLevel('WARNING')", [2], ["verbose 2"]),
    ],
    ids=["script", "basicConfig", "level"],
)
def test_the_first_fit_says_which_devices_train(setup, verbose, expected, tmp_path):
    """The devices are announced once, on stderr, when the first fit begins that is not silent."""
    (tmp_path / "script.py").write_text(SCRIPT.format(setup=setup, verbose=verbose))
    lines = output_of(tmp_path / "script.py").splitlines()
    assert [line for line in lines if "tower" in line or line.startswith("verbose")] == expected
