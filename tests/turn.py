"""Choose by the commit what takes turns: one commit runs the same tests each time, and the next one others."""

import os
import subprocess
from pathlib import Path


def _of_commit() -> int:
    """Returns a number for the commit; 0 outside a clone."""
    command = ["git", "rev-parse", "HEAD"]
    found = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parent)
    return int(found.stdout[:5], 16) if found.returncode == 0 else 0


# The environment variable repeats the turn of another commit.
TURN = int(os.environ.get("KERAS_DP_TEST_TURN") or _of_commit())
# The first seed of the random programs of this turn.
SEED = 1000 * TURN

if __name__ == "__main__":
    print(TURN)
