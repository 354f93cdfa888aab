"""The command `keras-dp launch` starts workers with their environment, prints their output, and ends them."""

import argparse
import collections
import io
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from keras_dp.cli import main
from keras_dp.cli.launch import command as launch
from keras_dp.cli.launch import cores
from keras_dp.cli.launch.members import Members
from keras_dp.devices import nvidia

REPORT = """
import json, os, sys
names = ("TF_CONFIG", "KERAS_DP_TOWERS", "KERAS_DP_RESTART", "CUDA_VISIBLE_DEVICES", "PYTHONUNBUFFERED")
print(json.dumps({"arguments": sys.argv[1:], **{name: os.environ.get(name) for name in names}}))
"""

# Defines `index`, and `wait_for(name)` and `tell(name)`, which synchronize workers by files in the current directory.
BEGIN = """
import json, os, pathlib, signal, subprocess, sys, time
index = json.loads(os.environ["TF_CONFIG"])["task"]["index"]

def tell(name):
    pathlib.Path(f"{name}.writing").write_text(str(os.getpid()))
    os.rename(f"{name}.writing", name)

def wait_for(name):
    end = time.monotonic() + 20
    while not os.path.exists(name) and time.monotonic() < end:
        time.sleep(0.01)
"""


@pytest.fixture(autouse=True)
def user_directory(tmp_path, monkeypatch):
    """Changes to an empty directory, and hides all GPUs except those that a test adds."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(nvidia, "DRIVER", tmp_path / "gpus")
    for name in ("TF_CONFIG", "KERAS_DP_TOWERS", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def run(script, options="--workers 2", arguments=(), begin=BEGIN):
    """Launches a script, which must not take long, and returns the launcher's exit code."""
    Path("script.py").write_text(begin + script, encoding="utf-8")
    started = time.monotonic()
    code = main(["launch", *options.split(), "script.py", *arguments])
    assert time.monotonic() - started < 30
    return code


def reports(output):
    """Returns the output of REPORT on each worker, with TF_CONFIG parsed."""
    found = [json.loads(line[line.index("{") :]) for line in sorted(output.splitlines(), key=lambda line: line[:4])]
    return [{**report, "TF_CONFIG": json.loads(report["TF_CONFIG"])} for report in found]


def becomes(condition, seconds=20):
    """Waits until a condition holds, and returns whether it does."""
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)
    return condition()


def when_told(name, action):
    """Starts a thread that calls `action` when a worker has called `tell(name)`."""
    thread = threading.Thread(target=lambda: becomes(Path(name).exists) and action())
    thread.start()
    return thread


def ends(name):
    """Waits for the process that called `tell(name)`, and returns whether it ends; a zombie process counts as ended."""
    status = Path(f"/proc/{Path(name).read_text()}/status")
    try:
        return becomes(lambda: "\nState:\tZ" in status.read_text(), 10)
    except (FileNotFoundError, ProcessLookupError):
        return True


def test_workers_know_each_other(capsys):
    arguments = ["--epochs", "3", "--w", "-h", "--workers", "7", "two words", "-m"]
    assert run(REPORT, "--workers 3", arguments, begin="") == 0
    found = reports(capsys.readouterr().out)
    addresses = found[0]["TF_CONFIG"]["cluster"]["worker"]
    assert len(set(addresses)) == 3
    assert all(re.fullmatch(r"127\.0\.0\.1:\d+", address) for address in addresses)
    for index, report in enumerate(found):
        assert report["TF_CONFIG"] == {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": index}}
        assert report["arguments"] == arguments
        assert (report["KERAS_DP_RESTART"], report["PYTHONUNBUFFERED"]) == ("0", "1")
        assert report["KERAS_DP_TOWERS"] is report["CUDA_VISIBLE_DEVICES"] is None


def test_module(user_directory, capsys):
    (user_directory / "package").mkdir()
    (user_directory / "package" / "training.py").write_text(REPORT)
    arguments = ["-m", "package.training", "--epochs", "3"]
    assert main(["launch", "--workers", "1", "--towers-per-worker", "2", *arguments]) == 0
    (report,) = reports(capsys.readouterr().out)
    assert (report["arguments"], report["KERAS_DP_TOWERS"]) == (["--epochs", "3"], "2")
    assert main(["launch", "--hosts", "alpha", *arguments]) == 0
    assert capsys.readouterr().out.splitlines()[1].endswith("' python -m package.training --epochs 3")


@pytest.mark.parametrize(
    ("visible", "workers", "towers", "expected"),
    [
        (None, 2, None, ["0,1", "2,3"]),
        (None, 3, 1, ["0", "1", "2"]),
        ("GPU-8932f937, GPU-d7b0c9a1", 2, None, ["GPU-8932f937", "GPU-d7b0c9a1"]),
        ("2,3,-1,1", 2, None, ["2", "3"]),
        ("-1", 2, 3, [None, None]),
        ("0,1,2", 2, None, "Each of 2 workers needs the same number of GPUs. Received: 3 GPUs. Change --workers"),
        ("0,1,2", 2, 2, "Each of 2 workers needs 2 GPUs. Received: 3 GPUs. Change --workers"),
    ],
)
def test_gpus_are_divided(user_directory, monkeypatch, visible, workers, towers, expected):
    for index in range(4):
        (user_directory / "gpus" / f"0000:0{index}:00.0").mkdir(parents=True)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    if isinstance(expected, str):
        with pytest.raises(argparse.ArgumentError, match=expected):
            launch._gpus_of_workers(workers, towers)
    else:
        assert [variables.get("CUDA_VISIBLE_DEVICES") for variables in launch._gpus_of_workers(workers, towers)] == expected


def test_lines_are_not_mixed_and_have_the_number_of_their_worker(capsys):
    script = r"""
for line in range(100):
    for part in (*[str(index) * 50] * 3, chr(10)):
        (sys.stdout if line % 2 else sys.stderr).write(part)
sys.stdout.flush()
sys.stdout.buffer.write(b"\nlast\r\nbyte \xff")
"""
    assert run(script, "--workers 3") == 0
    output = capsys.readouterr()
    lines = {f"[{index}] {str(index) * 150}": 50 for index in range(3)}
    last = {f"[{index}] {line}": 1 for index in range(3) for line in ("", "last", "byte \ufffd")}
    assert collections.Counter(output.err.splitlines()) == lines
    assert collections.Counter(output.out.removesuffix("\n").split("\n")) == lines | last


def test_lines_are_printed_as_they_come(capfd):
    seen = []

    def read():
        while not seen or not seen[-1]:
            seen.append(capfd.readouterr().out)
        Path("read").touch()

    thread = when_told("printed", read)
    assert run("print('first'); tell('printed'); wait_for('read'); print(os.path.exists('read'))", "--workers 1") == 0
    thread.join()
    assert seen[-1] == "[0] first\n"
    assert capfd.readouterr().out == "[0] True\n"


def test_nobody_reads_the_output(monkeypatch, capsys):
    class Closed(io.StringIO):
        def write(self, text):
            raise BrokenPipeError

    monkeypatch.setattr(sys, "stdout", Closed())
    assert run("while True: print('more')", "--workers 1") == 1
    assert "[0] BrokenPipeError" in capsys.readouterr().err


def test_failure_is_summarized(capsys):
    script = """
if index == 0:
    wait_for("told")
    time.sleep(0.2)
    sys.exit("worker 1 is lost")
for line in range(30):
    print("line", line, flush=True)
tell("told")
raise SystemExit(3)
"""
    assert run(script) == 3
    before, summary = capsys.readouterr().err.split("keras-dp launch: ")
    assert before == "[0] worker 1 is lost\n"
    title, *lines = summary.splitlines()
    assert title == "worker 1 failed first, with exit code 3. Its last lines:"
    assert lines == [f"[1] line {line}" for line in range(10, 30)]


def test_others_are_terminated(monkeypatch, capsys):
    monkeypatch.setattr(launch, "GRACE_SECONDS", 0.3)
    script = """
if index == 1:
    wait_for("ready")
    raise ValueError("lost")

def end(number, frame):
    print("terminated", time.monotonic() - begin > 0.25)
    sys.exit(0)

signal.signal(signal.SIGTERM, end)
begin = time.monotonic()
tell("ready")
time.sleep(60)
"""
    assert run(script) == 1
    output = capsys.readouterr()
    assert output.out == "[0] terminated True\n"
    assert output.err.endswith("\n[1] ValueError: lost\n")


def test_others_are_killed_if_they_do_not_end(monkeypatch, capsys):
    monkeypatch.setattr(launch, "GRACE_SECONDS", 0.1)
    monkeypatch.setattr(launch, "KILL_SECONDS", 0.3)
    script = """
if index == 1:
    wait_for("ready")
    os.kill(os.getpid(), signal.SIGKILL)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
tell("ready")
time.sleep(60)
"""
    assert run(script) == 128 + signal.SIGKILL
    assert "worker 1 failed first, with signal 9 (Killed)." in capsys.readouterr().err
    assert ends("ready")


def test_what_a_worker_has_started_ends_with_it():
    script = """
if index == 0:
    subprocess.Popen([sys.executable, "-c", "import os, time; open('child', 'w').write(str(os.getpid())); time.sleep(60)"])
    while not os.path.exists("child") or not os.path.getsize("child"):
        time.sleep(0.01)
    os._exit(5)
wait_for("child")
"""
    assert run(script) == 5
    assert ends("child")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_go_to_the_workers(capsys, number):
    script = f"""
def end(number, frame):
    print("got", number)
    sys.exit(index)

signal.signal({int(number)}, end)
tell(f"ready{{index}}")
if index == 0:
    wait_for("ready1")
    tell("ready")
time.sleep(60)
"""
    before = signal.getsignal(number)
    thread = when_told("ready", lambda: os.kill(os.getpid(), number))
    assert run(script, "--workers 2 --max-restarts 2") == 128 + number
    thread.join()
    output = capsys.readouterr()
    assert sorted(output.out.splitlines()) == [f"[{index}] got {int(number)}" for index in (0, 1)]
    assert output.err == ""
    assert signal.getsignal(number) == before


@pytest.mark.parametrize(("handler", "seconds", "code"), [(signal.SIG_DFL, 60, 128 + signal.SIGHUP), (signal.SIG_IGN, 0.3, 0)])
def test_terminal_is_closed(handler, seconds, code):
    """Closing the terminal ends the launcher, unless it runs under nohup."""
    before = signal.signal(signal.SIGHUP, handler)
    try:
        thread = when_told("ready", lambda: os.kill(os.getpid(), signal.SIGHUP))
        assert run(f"tell('ready'); time.sleep({seconds})", "--workers 1") == code
        thread.join()
        assert signal.getsignal(signal.SIGHUP) == handler
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("twice", [True, False])
def test_signals_kill_in_the_end(monkeypatch, twice):
    """A second signal does so at once."""
    monkeypatch.setattr(launch, "KILL_SECONDS", 30.0 if twice else 0.2)
    script = """
signal.signal(signal.SIGTERM, lambda number, frame: tell("stubborn"))
tell("ready")
while True:
    time.sleep(60)
"""
    threads = [when_told("ready", lambda: os.kill(os.getpid(), signal.SIGTERM))]
    if twice:
        threads.append(when_told("stubborn", lambda: os.kill(os.getpid(), signal.SIGINT)))
    assert run(script, "--workers 1") == 128 + signal.SIGTERM
    for thread in threads:
        thread.join()
    assert ends("stubborn")


def test_restarts_have_an_end(capsys):
    assert run("sys.exit(4 + int(os.environ['KERAS_DP_RESTART']))", "--workers 1 --max-restarts 2") == 6
    assert re.findall("exit code .", capsys.readouterr().err) == ["exit code 4", "exit code 5", "exit code 6"]


def test_a_worker_that_fails_twice_in_a_row_is_left_out(monkeypatch, capsys):
    """The others go on with their own GPUs, new numbers, and new ports."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6")
    script = REPORT + "sys.exit(3 if os.environ['CUDA_VISIBLE_DEVICES'] == '4' else 0)"
    assert run(script, "--workers 3 --max-restarts 6 --min-workers 2") == 0
    output = capsys.readouterr()
    found = reports(output.out)
    seen = [(one["KERAS_DP_RESTART"], one["CUDA_VISIBLE_DEVICES"], one["TF_CONFIG"]["task"]["index"]) for one in found]
    assert len({json.dumps(one["TF_CONFIG"]["cluster"]) for one in found}) == 3
    every = [(restart, gpu, index) for restart in "01" for index, gpu in enumerate("456")]
    assert sorted(seen) == [*every, ("2", "5", 0), ("2", "6", 1)]
    assert re.findall(r"keras-dp launch: (.* start again, .*)", output.err) == [
        "all workers start again, restart 1 of 6.",
        "worker 0 has failed twice in a row and is left out, 2 workers start again, restart 2 of 6.",
    ]


@pytest.mark.parametrize(
    ("least", "culprits", "places"),
    [
        (3, [1, 1, 1], [[0, 1, 2]] * 3),
        (2, [1, 1, 0, 1, 1], [[0, 1, 2], [0, 2], [0, 1, 2], [0, 2], [0, 1, 2]]),
        # Two workers are broken, and the one that was left out first keeps failing when it is tried again.
        (1, [2, 2, 0, 2, 0], [[0, 1, 2], [0, 1], [0, 1, 2], [0, 1], [1]]),
        (1, [0, 0, 1, 1, 0], [[0, 1, 2], [1, 2], [0, 1, 2], [0, 1, 2], [1, 2]]),
    ],
)
def test_a_worker_that_was_left_out_is_tried_again(least, culprits, places):
    members, seen = Members(3, least), []
    for culprit in culprits:
        members.start_again(culprit)
        seen.append(list(members.places))
    assert seen == places


def test_a_worker_that_stands_still_is_left_out_and_not_those_that_lose_it(monkeypatch, capsys):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    monkeypatch.setattr(launch, "GRACE_SECONDS", 0.1)
    script = """
if os.environ["CUDA_VISIBLE_DEVICES"] == "5":
    time.sleep(60)
elif len(json.loads(os.environ["TF_CONFIG"])["cluster"]["worker"]) == 2:
    sys.exit("keras_dp.workers.group.WorkerLostError: Worker 1 (127.0.0.1:1) is lost: it has not answered for 6 s.")
"""
    assert run(REPORT + script, "--workers 2 --max-restarts 3 --min-workers 1") == 0
    output = capsys.readouterr()
    last = [report for report in reports(output.out) if report["KERAS_DP_RESTART"] == "2"]
    assert [report["CUDA_VISIBLE_DEVICES"] for report in last] == ["4"]
    assert "worker 1 has failed twice in a row and is left out, 1 worker starts again, restart 2 of 3." in output.err


@pytest.mark.parametrize(
    ("options", "addresses"),
    [
        ("--hosts alpha,beta:99,[::1],[fe80::1]:7 --port 5000", ["alpha:5000", "beta:99", "[::1]:5000", "[fe80::1]:7"]),
        ("--hosts alpha,alpha,beta,alpha:2223 --workers 4", ["alpha:2222", "alpha:2223", "beta:2222", "alpha:2224"]),
    ],
)
def test_commands_for_hosts(user_directory, capsys, options, addresses):
    arguments = ["--name", "it's $HOME", "--x={1,2}"]
    Path("my script.py").write_text(REPORT)
    assert main(["launch", *options.split(), "--towers-per-worker", "3", "my script.py", *arguments]) == 0
    commands = capsys.readouterr().out
    assert re.findall("# (.*)", commands) == addresses
    (user_directory / "python").symlink_to(sys.executable)
    path = f"{user_directory}:{os.environ['PATH']}"
    printed = subprocess.check_output(["bash", "-eu"], input=commands, text=True, env={"PATH": path})
    found = [report for line in printed.splitlines() for report in reports(line)]
    for index, report in enumerate(found):
        assert report["TF_CONFIG"] == {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": index}}
        assert (report["arguments"], report["KERAS_DP_TOWERS"]) == (arguments, "3")
    assert len(found) == len(addresses)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--workers 0 script.py", "argument --workers: must be an integer from 1 to 65535. Received: '0'"),
        ("--workers 2 --max-restarts -1 script.py", "--max-restarts: must be an integer of at least 0. Received: '-1'"),
        ("--hosts a --port 70000 script.py", "--port: must be an integer from 1 to 65535. Received: '70000'"),
        ("--workers 2 missing.py", "There is no such script. Received: 'missing.py'."),
        ("--workers 2", "the following arguments are required: script"),
        ("script.py --workers 2", "Either --workers or --hosts is needed. Received: neither."),
        ("--workers 3 --hosts a,b script.py", "--workers and --hosts differ. Received: 3 and 2."),
        *((f"--hosts a --{option} script.py", f"--hosts starts nothing. Received: --{option}.")
          for option in ("max-restarts 1", "min-workers 1", "share-cores")),
        ("--workers 2 --min-workers 3 --max-restarts 1 a.py", "--min-workers is more than --workers. Received: 3 and 2."),
        ("--workers 2 --min-workers 1 a.py", "--min-workers is for restarts. Received: no --max-restarts."),
        ("--hosts a,,b script.py", "A host is name, name:port or [IPv6]:port. Received: ''"),
        ("--hosts ::1 script.py", "A host is name, name:port or [IPv6]:port. Received: '::1'"),
        ("--hosts a:0 script.py", "--hosts: must be an integer from 1 to 65535. Received: '0'"),
    ],
)  # fmt: skip
def test_wrong_arguments(user_directory, capsys, arguments, message):
    (user_directory / "script.py").touch()
    with pytest.raises(SystemExit) as refusal:
        main(["launch", *arguments.split()])
    assert refusal.value.code == 2
    assert message in capsys.readouterr().err


CORES = """
import os, time
print(json.dumps(sorted(os.sched_getaffinity(0))))
tell(f"told {index}")
"""


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="Linux alone can divide cores among processes.")
@pytest.mark.parametrize("options", ["--workers 2", "--workers 2 --share-cores"])
def test_each_worker_has_cores_of_its_own(options, capfd):
    available = sorted(os.sched_getaffinity(0))
    # A process may have read its cores before the launcher sets them.
    assert run("time.sleep(0.5)" + CORES, options) == 0
    of_workers = [json.loads(line.partition(" ")[2]) for line in sorted(capfd.readouterr().out.splitlines())]
    if "--share-cores" in options or len(available) < 2:
        assert of_workers == [available, available]
    else:
        assert sorted(of_workers[0] + of_workers[1]) == available
        assert abs(len(of_workers[0]) - len(of_workers[1])) <= 1


def test_threads_of_one_core_belong_to_one_worker(tmp_path, monkeypatch):
    """On many machines, the second hardware thread of core i has the number i + the number of cores."""
    monkeypatch.setattr(cores, "_TOPOLOGY", tmp_path)
    monkeypatch.setattr(cores.os, "sched_getaffinity", lambda process: set(range(8)), raising=False)
    monkeypatch.setattr(cores.sys, "platform", "linux")
    for core in range(8):
        topology = tmp_path / f"cpu{core}" / "topology"
        topology.mkdir(parents=True)
        (topology / "physical_package_id").write_text("0")
        (topology / "core_id").write_text(str(core % 4))
    assert cores.shares(2) == [{0, 4, 1, 5}, {2, 6, 3, 7}]
    assert cores.shares(3) == [{0, 4}, {1, 5, 2}, {6, 3, 7}]
    assert cores.shares(9) == [frozenset()] * 9
    monkeypatch.setattr(cores, "_TOPOLOGY", tmp_path / "nowhere")
    assert cores.shares(2) == [{0, 1, 2, 3}, {4, 5, 6, 7}]
