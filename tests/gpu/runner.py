"""Run each part in a process of its own, with a time limit, and write the report after each one."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

TESTS = Path(__file__).parents[1]
LAST_LINES = 12
# A part that begins with less time than this learns nothing: TensorFlow alone needs seconds to start.
LEAST_SECONDS = 10.0

EXACT, MEASURED = "exact", "measured"
DIFFERENT, FAILED, TIMED_OUT = "NOT EXACT", "FAILED", "TIMED OUT"
NO_TIME, INTERRUPTED = "no time left", "interrupted"


def run_parts(parts, directory, seconds, quick, tell):
    """Runs parts one after the other, in `seconds` together, and calls `tell` with the results so far after each.

    Records and logs of the parts are in `directory`. A result has the part's name and what it teaches, the "result", "seconds",
    as "error" the last lines of its output if it has failed, and all that it has recorded. After Ctrl-C, the last result is
    "interrupted".
    """
    (directory / "parts").mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + seconds
    results = []
    for part in parts:
        left = end - time.monotonic()
        if left < LEAST_SECONDS:
            results.append(_result(part, NO_TIME, 0.0, {}, []))
        else:
            results.append(_run(part, directory / "parts", min(part.limit_seconds, left), quick))
        tell(results)
        if results[-1]["result"] == INTERRUPTED:
            break
    return results


def is_good(results):
    """Returns whether no part has failed, has run out of its own time, or has found a result that is not exact."""
    return not any(result["result"] in (DIFFERENT, FAILED, TIMED_OUT) for result in results)


def _run(part, directory, seconds, quick):
    record, log = directory / f"{part.name}.json", directory / f"{part.name}.log"
    record.unlink(missing_ok=True)
    command = [sys.executable, "-m", "gpu.part", part.module, str(record), *(["--quick"] if quick else [])]
    begin = time.monotonic()
    with log.open("wb") as output:
        streams = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": subprocess.STDOUT}
        process = subprocess.Popen(command, env=_environment(), start_new_session=True, **streams)
    ended = None
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        ended = TIMED_OUT
    except KeyboardInterrupt:
        ended = INTERRUPTED
    finally:
        _kill_group(process)
    recorded = json.loads(record.read_text(encoding="utf-8")) if record.exists() else {}
    if ended is None:
        ended = _verdict(process.returncode, recorded)
    lines = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    error = lines[-LAST_LINES:] if ended in (FAILED, TIMED_OUT) else []
    if ended == TIMED_OUT:
        error.append(f"ended after {seconds:.0f} s")
    return _result(part, ended, time.monotonic() - begin, recorded, error)


def _verdict(code, recorded):
    if code:
        return FAILED
    if recorded["different"]:
        return DIFFERENT
    return EXACT if recorded["compared"] else MEASURED


def _result(part, result, seconds, recorded, error):
    about = {"name": part.name, "teaches": part.teaches, "without_gpus": part.without_gpus}
    return {**about, "result": result, "seconds": round(seconds, 1), "error": error, **recorded}


def _environment():
    """Returns the environment of a part, which finds the tests and the package, and sets its own limits of GPU memory."""
    paths = [str(TESTS), str(TESTS.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    ours = {"PYTHONPATH": os.pathsep.join(paths), "KERAS_BACKEND": "tensorflow", "PYTHONUNBUFFERED": "1"}
    environment = {"TF_CPP_MIN_LOG_LEVEL": "2", **os.environ, **ours}
    # Parts decide by themselves whether memory grows, or has a limit.
    environment.pop("TF_FORCE_GPU_ALLOW_GROWTH", None)
    return environment


def _kill_group(process):
    """Kills a part that has not ended, and the processes that it has left behind."""
    # Both errors say that all have ended; the second is macOS's.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
