"""Schedules, costs and simulated steps are those that are computed by hand."""

import collections
import dataclasses
import itertools
import math

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers
from ways_of_wrapping import wrapped

from keras_dp.arithmetic.work import work_of_operations
from keras_dp.gpu_model.audit import kinds_of_copies
from keras_dp.gpu_model.hardware import GPUS, Link, Machine, Processor, best_and_worst, machine_of
from keras_dp.gpu_model.loops import rounds_of_operations
from keras_dp.gpu_model.placement import logical_cpus_for_gpus, place_step
from keras_dp.gpu_model.programs import programs_of
from keras_dp.gpu_model.schedule import Span, Task, schedule
from keras_dp.gpu_model.simulation import simulate
from keras_dp.gpu_model.timeline import timeline
from keras_dp.reports.step_graph import graph_of_step


def test_tasks_wait_for_others_and_for_resources():
    tasks = [
        Task(2.0, ("gpu",), ()),
        Task(3.0, ("gpu",), ()),
        Task(1.0, ("link",), (0,)),
        Task(1.0, ("other", "link"), (0,)),
        Task(1.0, (), (1, 3)),
    ]
    assert schedule(tasks) == [Span(0, 2), Span(2, 5), Span(2, 3), Span(3, 4), Span(5, 6)]


def test_resources_take_tasks_in_the_order_in_which_they_are_ready():
    tasks = [Task(5.0, (), ()), Task(1.0, ("gpu",), (0,)), Task(1.0, (), ()), Task(9.0, ("gpu",), (2,))]
    assert schedule(tasks)[1] == Span(10, 11)


def test_copies_wait_for_what_their_devices_were_given_before():
    tasks = [Task(2.0, ("gpu",), ()), Task(3.0, ("gpu",), ()), Task(1.0, ("link",), (0,), ("gpu",)), Task(1.0, ("gpu",), (0,))]
    # The last task is ready at the same time as the copy, which does not occupy the device.
    assert schedule(tasks) == [Span(0, 2), Span(2, 5), Span(5, 6), Span(5, 6)]


def test_the_end_of_a_copy_is_seen_after_its_link_is_free():
    """Two copies of one GPU follow each other on the link, and what takes them begins when each end was seen."""
    copy = Task(1.0, ("link",), (), ending_seconds=4.0)
    tasks = [copy, copy, Task(1.0, ("gpu",), (0,)), Task(1.0, ("gpu",), (1,))]
    assert schedule(tasks) == [Span(0, 5), Span(1, 6), Span(5, 6), Span(6, 7)]


def test_queues_are_given_tasks_ahead():
    """The host gives the fourth task before the third one, which waits for the end of a copy; without a queue it is last."""

    def tasks(queue):
        return [
            Task(2.0, ("gpu",), (), queue=queue, giving_seconds=0.5),
            Task(1.0, ("link",), (0,)),
            Task(3.0, ("gpu",), (1,), queue=queue),
            Task(4.0, ("gpu",), (0,), queue=queue, giving_seconds=0.5),
            Task(4.0, ("gpu",), (3,), queue=queue),
        ]

    assert schedule(tasks("gpu")) == [Span(0, 2), Span(2, 3), Span(10, 13), Span(2, 6), Span(6, 10)]
    assert schedule(tasks("")) == [Span(0, 2), Span(2, 3), Span(6, 9), Span(2, 6), Span(9, 13)]


def test_tasks_that_wait_for_each_other_are_refused():
    with pytest.raises(ValueError, match="must not wait for each other. Received: 2 tasks that do"):
        schedule([Task(1.0, (), ()), Task(1.0, (), (2,)), Task(1.0, (), (1,))])


def test_operations_take_the_longer_of_arithmetic_and_memory():
    processor = Processor("gpu", 100.0, 400.0, 10.0, 50.0, 0.0, 0.5, matrix_efficiency=0.5, bandwidth_efficiency=0.2)
    assert processor.seconds(200.0, 0.0) == 20.0
    assert processor.seconds(200.0, 0.0, is_matrix=True) == 4.0
    assert processor.seconds(200.0, 0.0, is_matrix=True, is_half=True) == 1.0
    assert processor.seconds(200.0, 300.0) == 30.0
    assert processor.seconds(1.0, 1.0) == 0.5
    assert dataclasses.replace(processor, launches_ahead=False).seconds(200.0, 0.0) == 20.5
    link = Link("link", 10.0, latency_seconds=2.0, wire_seconds=0.5)
    assert (link.seconds(30.0), link.seconds_on_wire(30.0)) == (5.0, 3.5)
    assert dataclasses.replace(link, latency_seconds=0.1).seconds_on_wire(30.0) == 3.1


def test_machines_have_the_fastest_link_of_their_gpu_unless_it_is_named():
    assert machine_of("A100").link.name == "NVLink 3"
    assert machine_of("H100", "pcie").link.name == "PCIe 4.0 x16"
    with pytest.raises(ValueError, match=r"links of RTX 4090 are: pcie. Received: 'nvlink'"):
        machine_of("RTX4090", "nvlink")
    with pytest.raises(ValueError, match=r"one of T4, .*, RTX5090. Received: 'RTX4080'"):
        machine_of("RTX4080")
    assert all(gpu.source for gpu in GPUS.values())


def test_work_of_products_and_sums():
    specs = tf.TensorSpec([4, 5]), tf.TensorSpec([5, 6])
    concrete = tf.function(lambda x, y: tf.matmul(x, y) + 1.0).get_concrete_function(*specs)
    work = {operation.type: work_of_operations(concrete.graph)[operation.name] for operation in concrete.graph.get_operations()}
    assert work["MatMul"].flops == 2 * 4 * 5 * 6
    assert work["MatMul"].bytes == 4 * (4 * 5 + 5 * 6 + 4 * 6)
    assert work["MatMul"].outputs == (4 * 4 * 6,)
    assert work["AddV2"].flops == 4 * 6


def placed(build, towers, rows, **compiled):
    """Returns a model on GPUs, the graph of its step, and the placed step for a number of rows."""
    keras.config.set_floatx("float32")
    # TensorFlow keeps the number of devices that it starts with.
    with logical_cpus_for_gpus(2) as devices:
        parallel = wrapped(build(), devices=devices[:towers], pack_copies=True)
        parallel.compile(keras.optimizers.SGD(0.1), "sparse_categorical_crossentropy", **compiled)
        x = np.ones((6, *parallel.input_shape[1:]), parallel.inner_model.inputs[0].dtype)
        step = graph_of_step(parallel, (x, np.arange(6) % 4))
        return parallel, step, place_step(step, rows, parallel.devices)


def mlp():
    return keras.Sequential([keras.Input((64,)), *(layers.Dense(64, "relu") for _ in range(3)), layers.Dense(4, "softmax")])


INSTANT = Link("instant", 1e30, latency_seconds=0.0)
SLOW = Processor("slow", 1e9, 1e9, 1e9, 1e9, 0.0, 0.0, 1.0, 1.0)
FREE = dataclasses.replace(SLOW, vector_flops=1e30, matrix_flops=1e30, bandwidth=1e30)


def test_much_work_and_instant_links_scale():
    # The host needs some time for each operation, or it would have given the first tower all of its own before a copy begins.
    machine = Machine((dataclasses.replace(SLOW, launch_seconds=1e-6),), INSTANT, INSTANT, 0.0, 0.0)
    one, two = (simulate(placed(mlp, towers, 6_000)[2], machine) for towers in (1, 2))
    assert 1.7 < one.seconds / two.seconds <= 2.0
    assert min(two.busy.values()) > 0.85
    assert one.busy == {"GPU:0": pytest.approx(1.0, abs=0.01)}
    assert two.peak_bytes["GPU:1"] < 0.6 * one.peak_bytes["GPU:0"]


def test_no_work_and_slow_links_do_not_scale():
    """Weights go to the other tower, and its gradients come back: two latencies at least."""
    machine = Machine((FREE,), Link("slow", 1e30, latency_seconds=1.0), INSTANT)
    one, two = (simulate(placed(mlp, towers, 6)[2], machine) for towers in (1, 2))
    assert one.seconds < 0.1
    assert 2.0 <= two.seconds < 6.0


def test_timelines_show_what_devices_compute_and_receive():
    parallel, step, placed_step = placed(mlp, 2, 600)
    simulation = simulate(placed_step, machine_of("A100"))
    kinds = kinds_of_copies(parallel, step, placed_step)
    events = timeline(placed_step, simulation, kinds)["traceEvents"]
    rows = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    lasting = sorted((event for event in events if event["ph"] == "X"), key=lambda event: (event["tid"], event["ts"]))
    for one, following in itertools.pairwise(lasting):
        assert one["tid"] != following["tid"] or one["ts"] + one["dur"] <= following["ts"] + 1e-9
    assert max(event["ts"] + event["dur"] for event in lasting) == pytest.approx(1e6 * simulation.seconds)
    between = [event for event in lasting if rows[event["tid"]].startswith("receives from GPU")]
    assert collections.Counter(event["name"] for event in between) == collections.Counter(
        kind for copy, kind in kinds.items() if copy.source in placed_step.towers
    )
    weight_bytes = sum(4 * math.prod(weight.shape) for weight in parallel.trainable_weights)
    # The message holds the number of rows, too.
    assert 0 <= sum(event["args"]["bytes"] for event in between if event["name"] == "gradients") - weight_bytes < 16


def recurrent():
    return keras.Sequential([keras.Input((5, 3)), layers.Dense(4), layers.LSTM(4), layers.Dense(4, "softmax")])


@pytest.mark.parametrize("towers", [1, 2])
def test_programs_before_and_after_a_loop_do_not_wait_for_each_other(towers):
    """An operation after a loop waits for its last round, also where it takes nothing that the rounds make."""
    step = placed(recurrent, towers, 6)[2]
    programs = programs_of(step)
    assert 0.0 < simulate(step, machine_of("A100"), programs).seconds < simulate(step, machine_of("A100")).seconds


def test_launches_are_counted():
    _, _, step = placed(mlp, 1, 6)
    launched = simulate(step, Machine((dataclasses.replace(FREE, launch_seconds=1.0),), INSTANT, INSTANT, 0.0, 0.0)).seconds
    products = sum(operation.type == "MatMul" for operation in step.operations.values())
    # Forward, and two products for each layer backward, without the gradient of the inputs.
    assert products == 4 + 2 * 4 - 1
    assert products < launched < len(step.operations)
    assert launched == pytest.approx(round(launched))


def test_operations_of_loops_count_for_each_round():
    def recurrent():
        return keras.Sequential([keras.Input((7, 3)), layers.LSTM(5), layers.Dense(4, "softmax")])

    _, _, step = placed(recurrent, 1, 6)
    rounds = rounds_of_operations({name: operation.node for name, operation in step.operations.items()})
    products = [name for name, operation in step.operations.items() if operation.type == "MatMul"]
    forward = [name for name in products if name.startswith("partitioned/tower_0/sequential_1/lstm_1/while")]
    # One product with the inputs, and one with the state.
    assert [rounds[name] for name in forward] == [7, 7]
    assert {rounds.get(name, 1) for name in products if "while" not in name} == {1}


def normalized():
    stack = [layers.BatchNormalization() for _ in range(2)]
    return keras.Sequential([keras.Input((64,)), layers.Dense(64, "relu"), *stack, layers.Dense(4, "softmax")])


@pytest.mark.parametrize("towers", [1, 2])
def test_programs_are_those_of_a_compiled_step(towers):
    """Each of two batch normalizations lets towers meet twice; the update is a program of its own."""
    _, _, step = placed(normalized, towers, 600)
    programs = programs_of(step)
    of_devices = collections.Counter(program.device for program in programs)
    assert of_devices == ({"GPU:0": 1} if towers == 1 else {"GPU:0": 5 + 1, "GPU:1": 5})
    alone = set(step.operations) - {name for program in programs for name in program.operations}
    assert not any(step.operations[name].type in ("MatMul", "Relu") for name in alone)


def test_a_program_runs_its_products_and_what_is_fused_between_them():
    _, _, step = placed(mlp, 1, 600)
    (program,) = programs_of(step)
    types = {kernel: [step.operations[name].type for name in kernel.operations] for kernel in program.kernels}
    products = [kernel for kernel in program.kernels if "MatMul" in types[kernel]]
    assert len(products) == 4 + 2 * 4 - 1
    assert all(types[kernel] == ["MatMul"] for kernel in products)
    # The bias and the activation of a layer are one kernel.
    relu = next(kernel for kernel in program.kernels if "Relu" in types[kernel])
    assert "BiasAdd" in types[relu]
    launched = Machine((dataclasses.replace(FREE, launch_seconds=1.0),), INSTANT, INSTANT, 0.0, 0.0)
    seconds = simulate(step, launched, [program]).seconds
    assert len(products) < seconds <= len(program.kernels) + 2
    assert seconds < simulate(step, launched).seconds / 2


def test_a_kernel_reads_and_writes_its_ends_at_best():
    _, _, step = placed(mlp, 1, 600)
    (program,) = programs_of(step)
    best = Machine((dataclasses.replace(FREE, bandwidth=1.0),), INSTANT, INSTANT, 0.0, 0.0)
    worst = dataclasses.replace(best, processors=(dataclasses.replace(best.processors[0], fused=0.0),))
    assert simulate(step, best, [program]).seconds < 0.9 * simulate(step, worst, [program]).seconds


def test_nothing_goes_to_the_host_within_a_program():
    """TensorFlow compares integers on the host. Copies of logits there once ended long after the step that XLA compiles."""
    _, _, step = placed(mlp, 1, 600, metrics=["accuracy"])
    program = max(programs_of(step), key=lambda program: len(program.operations))
    within = [copy for copy in step.copies if {copy.tensor.partition(":")[0], *copy.takers} <= {*program.operations}]
    assert within
    assert any(copy.to_host for copy in within)
    slow = Machine((FREE,), INSTANT, dataclasses.replace(INSTANT, latency_seconds=1.0), 0.0, 0.0)
    alone, compiled = (simulate(step, slow, programs) for programs in ((), [program]))
    assert compiled.seconds < alone.seconds
    assert {compiled.spans[copy] for copy in within} == {compiled.spans[program.operations[0]]}


def test_a_machine_at_its_worst_waits_longer():
    _, _, step = placed(mlp, 2, 600)
    machines = best_and_worst(machine_of("A100"))
    for programs in ((), programs_of(step)):
        best, worst = (simulate(step, machine, programs).seconds for machine in machines)
        assert best < worst
