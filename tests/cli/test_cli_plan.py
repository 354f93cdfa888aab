"""The command `keras-dp plan` checks its arguments, shows its predictions, and runs from end to end."""

import argparse
import dataclasses
import json
from pathlib import Path

import keras
import pytest

from keras_dp import tables
from keras_dp.cli import main
from keras_dp.cli.plan import command as plan
from keras_dp.cli.plan import planning, table
from keras_dp.cli.plan.prediction import MirroredPlan, PlannedRun, Range, TowersPlan
from keras_dp.cli.runs import RunFailedError
from keras_dp.gpu_model import hardware


def planned_of(arguments):
    parser = argparse.ArgumentParser()
    plan.add_arguments(parser)
    options = parser.parse_args(arguments.split())
    return plan._planned(options, options.towers[-1])


def test_constants_of_the_machine_can_be_set():
    machine = planned_of("--gpu h100").machines()[0]
    assert (machine.processors[0].name, machine.link.name, machine.processors[0].launch_seconds) == (
        "H100 SXM 80 GB",
        "NVLink 4",
        5e-6,
    )
    numbers = "--launch-microseconds 2.5 --latency-microseconds 20 --gigabytes-per-second 100"
    for machine in planned_of(f"--gpu H100 --link pcie {numbers}").machines():
        constants = machine.processors[0].launch_seconds, machine.link.latency_seconds, machine.link.bandwidth
        assert constants == pytest.approx((2.5e-6, 2e-5, 1e11))


def test_a_machine_waits_longer_at_its_worst():
    best, worst = planned_of("--gpu h100").machines()
    assert (best.link.latency_seconds, worst.link.latency_seconds) == (15e-6, 40e-6)
    assert best.control_seconds < worst.control_seconds
    assert best.link.bandwidth == worst.link.bandwidth


def test_arguments_describe_the_run():
    planned = planned_of("--towers 4 --batch 32 --scaling weak --parameter-device GPU:1")
    assert planned == PlannedRun("mlp", 4, 32, True, "GPU:1")


NUMBERS = {"name": "My GPU", "memory_gigabytes": 48, "memory_gigabytes_per_second": 864, "teraflops": 38.7}


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Returns a function that writes JSON to the file my.json of the current folder."""
    monkeypatch.chdir(tmp_path)
    return lambda value: Path("my.json").write_text(json.dumps(value))


def checked(copies):
    """Returns what `keras-dp check` has found of copies between GPUs."""
    return [{"name": "devices"}, {"name": "copies", "verdict": "pass", "data": copies}]


def refused(arguments, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["plan", *arguments.split()])
    assert ended.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--parameter-device CPU:0", "must be a GPU, such as GPU:1, or \"sharded\". Received: 'CPU:0'"),
        ("--latency-microseconds -1", "must be a positive number. Received: '-1'"),
        ("--gigabytes-per-second fast", "must be a positive number. Received: 'fast'"),
        ("--memory 24", "must be a size such as 24GB. Received: '24'"),
        ("--memory 0GB", "must be a size such as 24GB. Received: '0GB'"),
        ("--timeline missing/step.json", "must be a file that can be written. Received: 'missing/step.json'"),
        ("--constants missing.json", "must be a file that keras-dp check --json has written on GPUs. Received: 'missing.json'"),
        ("--gpu RTX4080", "or a JSON file with its numbers, such as my_gpu.json. Did you mean 'rtx4090'? Received: 'RTX4080'"),
        ("--gpu missing.json", "The numbers of a GPU must be in a JSON file. Received: 'missing.json'"),
        ("--gpu A100,RTX4080", "Did you mean 'rtx4090'? Received: 'RTX4080'"),
        ("--gpu A100,L4 --rows 3,2,1", "--rows: give one share for each of 2 GPUs. Received: 3,2,1"),
        ("--rows 3,0", "must be an integer of at least 1. Received: '0'"),
        ("--gpu RTX4090 --link nvlink", "The links of RTX 4090 are: pcie. Received: 'nvlink'"),
    ],
)
def test_wrong_arguments_are_refused(arguments, message, capsys):
    assert message in refused(arguments, capsys)


NONE = dict.fromkeys(("most_sent", "most_received", "host_copies", "controls", "misplaced"), 0)
FOUND = {"to_host": 1, "from_host": 2, "audit": "nothing to say"}
TIMES = Range(8.0, 10.0), Range(4.0, 8.0)
MEMORY = {"peak_megabytes": 1_000.0, "memory_megabytes": 1_500.0}
FIRST = TowersPlan(64, *TIMES, (1.0, 1.0), **MEMORY, copies={"weights": 0}, without_kernel={}, **NONE, **FOUND)


def test_table_of_speed_ups(monkeypatch, capsys):
    second = dataclasses.replace(FIRST, milliseconds=Range(5.0, 8.0), busy=(0.9, 0.5), most_sent=5, most_received=6, controls=2)
    copies = {"weights": 3, "other": 4}
    plans = iter([FIRST, dataclasses.replace(second, copies=copies, audit="the audit", largest_batch=4096)])
    monkeypatch.setattr(plan, "plan_in_new_process", lambda planned: next(plans))
    monkeypatch.delattr(plan, "mirrored_in_new_process")  # which nothing asks for
    assert main(["plan", "--towers", "1,2"]) == 0
    shown = capsys.readouterr().out
    assert "A100 40 GB, 5 µs a launch; NVLink 3, 15 to 40 µs and 250 GB/s" in shown
    lines = [" ".join(line.split()) for line in shown.splitlines()]
    assert "1 64 8.00 to 10.00 4.00 to 8.00 1.00 100 to 100 1000 any 0 0 0 0 1 + 2" in lines
    assert "2 64 5.00 to 8.00 4.00 to 8.00 1.60 to 1.25 90 to 50 1000 4096 7 5 6 2 1 + 2" in lines
    assert [text in shown for text in ("the audit", "nothing to say", "irrored")] == [True, False, False]
    assert max(map(len, shown.splitlines())) <= 128


PEER = MirroredPlan(Range(7.5, 7.5), (1.0, 1.0), 900.0, collectives=1, collective_megabytes=3.0, collective_milliseconds=0.5)


def test_steps_under_mirrored_strategy_stand_beside(monkeypatch, capsys):
    def of_peer(planned):
        if planned.towers == 1:
            return PEER
        raise RunFailedError("clipping is not for it")

    monkeypatch.setattr(plan, "plan_in_new_process", lambda planned: FIRST)
    monkeypatch.setattr(plan, "mirrored_in_new_process", of_peer)
    assert main(["plan", "--towers", "1,2", "--mirrored", "--json"]) == 0
    captured = capsys.readouterr()
    lines = [" ".join(line.split()) for line in captured.err.splitlines()]
    assert "1 64 8.00 to 10.00 4.00 to 8.00 7.50 1.00 100 to 100 1000 any 0 0 0 0" in lines
    assert "2 64 8.00 to 10.00 4.00 to 8.00 - 1.00 100 to 100 1000 any 0 0 0 0" in lines
    assert "the step under MirroredStrategy on 2 GPUs cannot be predicted:\nclipping is not for it" in captured.err
    assert "Mirrored: the step under MirroredStrategy" in captured.err
    first, second = (answer["mirrored"] for answer in json.loads(captured.out))
    assert first == dataclasses.asdict(PEER) | {"busy": [1.0, 1.0], "milliseconds": [7.5, 7.5]}
    assert second is None


def test_constants_that_check_has_measured(write):
    write(checked({f"GPU:0 to GPU:{i}": {"microseconds": 10.0 * i, "gigabytes_per_second": 30.0 - i} for i in (1, 2, 3)}))
    for more, latency in (("", 2e-5), (" --latency-microseconds 7", 7e-6)):
        for machine in planned_of(f"--constants my.json{more}").machines():
            assert (machine.link.latency_seconds, machine.link.bandwidth) == pytest.approx((latency, 27e9))


def test_a_gpu_of_the_users_own_numbers(write):
    write(NUMBERS)
    machine = planned_of("--gpu my.json").machines()[0]
    processor = machine.processors[0]
    assert (processor.name, processor.memory_bytes, processor.bandwidth) == ("My GPU", 48e9, 864e9)
    assert processor.vector_flops == processor.matrix_flops == processor.half_flops == 38.7e12
    assert (processor.launch_seconds, machine.link.latency_seconds) == pytest.approx((5e-6, 15e-6))
    assert machine.link.bandwidth == machine.host_link.bandwidth == 25e9

    more = {"matrix_teraflops": 77, "half_teraflops": 155, "launch_microseconds": 4, "link_gigabytes_per_second": 56}
    write(NUMBERS | more | {"link_latency_microseconds": 10, "host_gigabytes_per_second": 30})
    machine = planned_of("--gpu my.json --memory 24GB").machines()[1]
    processor = machine.processors[0]
    assert (processor.matrix_flops, processor.half_flops, processor.memory_bytes) == (77e12, 155e12, 24e9)
    assert (processor.launch_seconds, machine.link.latency_seconds) == pytest.approx((4e-6, 1e-5))
    assert (machine.link.bandwidth, machine.host_link.bandwidth) == (56e9, 30e9)


def of_copies(latency, rate):
    return checked({"GPU:0 to GPU:1": {"microseconds": latency, "gigabytes_per_second": rate}})


GPU, CHECKED = "--gpu my.json", "must be a file that keras-dp check --json has written on GPUs"


@pytest.mark.parametrize(
    ("arguments", "numbers", "message"),
    [
        (GPU, NUMBERS | {"teraflop": 40}, "has an unknown field 'teraflop'. Did you mean 'teraflops'? The fields are: name, "),
        (GPU, {"name": "A", "teraflops": 1}, "must tell memory_gigabytes, memory_gigabytes_per_second. Received: name, teraf"),
        (GPU, NUMBERS | {"memory_gigabytes": "48GB"}, "must be a positive number, at most 1e+12. Received: '48GB'"),
        (GPU, NUMBERS | {"half_teraflops": -1}, "must be a positive number, at most 1e+12. Received: -1"),
        (GPU, NUMBERS | {"teraflops": True}, "must be a positive number, at most 1e+12. Received: True"),
        (GPU, NUMBERS | {"name": 4090}, "must be a string. Received: 4090"),
        (GPU, [48], "must hold an object with the fields name, memory_gigabytes"),
        (f"{GPU} --link nvlink", NUMBERS, "tells what connects the GPUs: leave --link out. Received: 'nvlink'"),
        ("--constants my.json", of_copies("12", 30.0), CHECKED),
        ("--constants my.json", of_copies(10.0, 0.0), CHECKED),
    ],
)
def test_files_of_numbers_that_cannot_be_are_refused(arguments, numbers, message, write, capsys):
    write(numbers)
    assert message in refused(arguments, capsys)


def test_gpus_are_as_on_their_data_sheets():
    """Rates are ordered, and sizes are plausible: a wrong unit would be off by a factor of 1,000."""
    for gpu in hardware.GPUS:
        processor = hardware.machine_of(gpu).processors[0]
        assert 5e12 < processor.vector_flops <= processor.matrix_flops < processor.half_flops < 1e15
        assert 2e11 < processor.bandwidth < 1e13
        assert 1e10 < processor.memory_bytes < 2e11
        assert all(1e10 < link.bandwidth < 1e12 for link in hardware.LINKS[gpu].values())


@pytest.mark.parametrize(
    ("peak", "first", "expected"),
    [
        (lambda rows: max(5e9, 1e9 + 1e6 * rows), 64, 23_000),
        (lambda rows: 25e9 + 1e6 * rows, 64, 0),
        (lambda rows: 5e9, 64, None),
        (lambda rows: 25e9, 64, 0),
        (lambda rows: 1e3 * rows, 300_000, 24_000_000),
    ],
    ids=["weights first", "weights alone exceed it", "any number", "none", "many"],
)
def test_the_largest_batch(peak, first, expected):
    received = planning.most_rows(lambda rows: peak(rows) / 24e9, first)
    assert received == (expected and pytest.approx(expected, rel=0.2))
    assert not received or peak(received) <= 24e9


def test_alternatives_and_json(monkeypatch, capsys):
    times = {None: 8.0, "sharded": 6.0}

    def predicted(planned):
        return dataclasses.replace(FIRST, milliseconds=Range(*[times[planned.parameter_device]] * 2))

    monkeypatch.setattr(plan, "plan_in_new_process", predicted)
    assert main(["plan", "--towers", "2", "--alternatives", "--json"]) == 0
    captured = capsys.readouterr()
    assert captured.err.count("parameter_device=") == 3  # two placements, and the better of them
    best = "Predicted to be the fastest: DataParallelModel(model, parameter_device='sharded')"
    assert best in captured.err
    answers = json.loads(captured.out)
    assert [answer["plan"]["milliseconds"][0] for answer in answers] == [8.0, 6.0]
    assert answers[1]["run"]["parameter_device"] == "sharded"


def test_what_does_not_fit_is_not_the_best():
    planned = [PlannedRun("mlp", 2), PlannedRun("mlp", 2, parameter_device="sharded")]
    fast = dataclasses.replace(FIRST, milliseconds=Range(1.0, 1.0), peak_megabytes=2000.0)
    *_, first, second, _, last = tables.text(table.advice(planned, [fast, FIRST])).splitlines()
    assert (first.split()[-1], second.split()[-1]) == ("yes", "no")
    assert "parameter_device='sharded'" in last
    assert tables.text(table.advice(planned[:1], [fast])).endswith("No placement fits.")


@pytest.mark.parametrize(
    ("peaks", "said"),
    [
        ([900, 500], ""),
        (
            [4_000, 2_100, 1_100, 900],
            "With slices_per_device=4, the step fits in the 1,500 MB of a GPU: the fullest needs 1,100",
        ),
        ([4_000, 3_900, 1_000], "With slices_per_device=2, the step still does not fit in the 1,500 MB"),
        ([4_000, 3_000, 2_500, 2_300], "With slices_per_device=8, the step still does not fit in the 1,500 MB"),
    ],
    ids=["fits", "in four", "does not fall", "rows are too few"],
)
def test_tells_in_how_many_slices_a_step_fits(peaks, said, monkeypatch, capsys):
    """A batch of 12 rows on 2 GPUs has 6 rows for each."""

    def predicted(planned):
        peak = peaks[planned.slices_per_device.bit_length() - 1]
        return dataclasses.replace(FIRST, batch_size=12, peak_megabytes=peak)

    monkeypatch.setattr(plan, "plan_in_new_process", predicted)
    assert main(["plan", "--towers", "2", "--memory", "1500MB"]) == 0
    shown = capsys.readouterr().out
    assert said in shown
    assert ("slices_per_device" in shown) == bool(said)


def test_gpus_that_are_not_alike_have_shares_by_their_speeds(monkeypatch, capsys):
    """The rows of one GPU take 4 ms alone on an A100, and 12 ms on an L4."""
    planned = []

    def predicted(one):
        planned.append(one)
        times = {("A100", 1): 4.0, ("L4", 1): 12.0}.get((one.gpu, one.towers), 12.0 if one.rows is None else 6.0)
        return dataclasses.replace(FIRST, batch_size=64, compiled_milliseconds=Range(times, times))

    monkeypatch.setattr(plan, "plan_in_new_process", predicted)
    assert main(["plan", "--gpu", "A100,l4", "--batch", "64"]) == 0
    shown = capsys.readouterr().out
    assert "A100 40 GB and L4" in shown
    assert (
        "32 rows take 4.00 ms on A100 and 12.00 ms on L4. With rows=[10, 3], the step takes 6.00 ms in place of 12.00" in shown
    )
    assert [(one.towers, one.gpu, one.rows) for one in planned] == [
        (1, "A100", None),
        (2, "A100,L4", None),
        (1, "A100", None),
        (1, "L4", None),
        (2, "A100,L4", [10, 3]),
    ]
    assert main(["plan", "--gpu", "A100,L4", "--rows", "3,1"]) == 0
    assert (planned[-1].rows, planned[-2].rows) == ([3, 1], None)
    assert "in place of" not in capsys.readouterr().out


@pytest.mark.promise
@pytest.mark.processes
def test_shares_by_speed_are_predicted_to_be_faster_than_equal_ones(tmp_path, monkeypatch, capsys):
    """One GPU computes three times as fast as the other, as a device with three cores beside one with a core."""
    monkeypatch.chdir(tmp_path)
    for name, speed in (("fast", 3.0), ("slow", 1.0)):
        own = {"name": name, "memory_gigabytes": 24, "teraflops": 5 * speed, "memory_gigabytes_per_second": 200 * speed}
        Path(f"{name}.json").write_text(json.dumps(own))
    times = {}
    for rows in ("1,1", "3,1"):
        options = ["--gpu", "fast.json,slow.json", "--towers", "2", "--batch", "65536", "--rows", rows]
        assert main(["plan", *options, "--json"]) == 0
        *_, last = json.loads(capsys.readouterr().out)
        times[rows] = last["plan"]["compiled_milliseconds"]
    assert max(times["3,1"]) < 0.7 * min(times["1,1"])


def test_more_rows_in_more_time_are_a_speed_up():
    more = dataclasses.replace(FIRST, batch_size=256, milliseconds=Range(16.0, 10.0))
    assert table.Line(PlannedRun("mlp", 4), more, FIRST).speed_up == (2, 4)


def test_a_failure_is_shown(in_process, capsys):
    assert main(["plan", "--model", "user_models:without_inputs", "--towers", "2"]) == 1
    shown = capsys.readouterr().out
    assert "the step on 2 GPUs cannot be predicted:\n" in shown
    assert "The model must have known inputs" in shown


def test_plans_a_model_of_the_user(in_process, tmp_path, capsys):
    keras.config.set_floatx("float32")
    options = ["--towers", "1,2", "--parameter-device", "sharded", "--timeline", str(tmp_path / "step.json")]
    assert main(["plan", "--model", "user_models:compiled", *options, "--json"]) == 0
    events = json.loads((tmp_path / "step.json").read_text())["traceEvents"]
    assert {event["args"]["name"] for event in events if event["name"] == "process_name"} == {"GPU:0", "GPU:1", "the host"}
    captured = capsys.readouterr()
    assert "operations on a wrong device        none" in captured.err
    one, two = json.loads(captured.out)
    assert min(*one["plan"]["milliseconds"], *two["plan"]["compiled_milliseconds"]) > 0
    # One GPU sends weights, gradients and moments to nobody, two GPUs to each other.
    assert one["plan"]["most_sent"] == 0 < two["plan"]["most_sent"] < 20


@pytest.mark.promise
@pytest.mark.processes
def test_operations_that_are_others_on_cpus_are_planned(in_users_directory, monkeypatch, capsys):
    """oneDNN, which is on by default on many CPUs, has a maximum pooling with two results. The process turns it off."""
    monkeypatch.setenv("TF_ENABLE_ONEDNN_OPTS", "1")
    assert main(["plan", "--model", "user_models:pooling", "--towers", "2", "--mirrored", "--json"]) == 0
    captured = capsys.readouterr()
    assert "operations without a GPU kernel     none" in captured.err
    mirrored = json.loads(captured.out)[0]["mirrored"]
    assert mirrored["collectives"] == 1
    assert mirrored["milliseconds"][0] > mirrored["collective_milliseconds"] > 0
