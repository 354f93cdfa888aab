"""Compare a step on towers with the same step on one device, and find the first operation that differs."""

import dataclasses
import logging
from collections.abc import Sequence, Set

import tensorflow as tf

from keras_dp.partition.facts.placements import Partial, Replicate, Shard
from keras_dp.partition.inspecting.both_ways import BothWays
from keras_dp.partition.inspecting.step_check import Agreement, Difference, StepCheck
from keras_dp.partition.placing.propagation import Propagation
from keras_dp.partition.tracing.graph import reached
from keras_dp.partition.tracing.names import Output, name_of
from keras_dp.partition.tracing.user_lines import user_line

_NOT_COMPARED = (tf.resource, tf.variant, tf.string)
# The axes to sum a broadcast gradient over: TensorFlow's kernel and its graph optimizer disagree about axes of size 1.
_NOT_UNIQUE = ("BroadcastGradientArgs",)
_AT_ONCE = 128  # tensors that are compared in one run
_BLIND_ROUNDS = 3  # in which no tensor differs yet, although a result or a variable does
_logger = logging.getLogger("keras_dp")


def compare_ends(step: str, both: BothWays) -> StepCheck:
    """Compares the results of a step of some name, and the variables after it."""
    return StepCheck(step, both.tolerance, *both.ends(), jit_compile=both.target.jit_compile)


def compare(step: str, both: BothWays) -> StepCheck:
    """Compares results, variables, and tensors within a step of some name.

    Large steps have thousands of tensors, and each one that is compared makes the towers gather it. So this compares some that
    are spread over the step. If anything differs, it compares others before the first one that differs, in several rounds,
    until it has found an operation that differs although its inputs do not. All this is without XLA, which fuses tensors away;
    where XLA compiles the towers, results and variables are compared with it as well.
    """
    comparable = _comparable(both.propagation)
    results, variables, found = both.measured(_spread(comparable))
    is_same, blind_rounds = not (results.different or variables.different), 0
    while True:
        first = next((output for output in comparable if output in found and found[output].is_different), None)
        unknown = [output for output in comparable if output not in found]
        if first is not None:
            behind = _behind(first, both.propagation)
            inputs = _behind(first, both.propagation, frozenset(comparable)) & set(unknown)
            if not inputs:
                break
            others = [output for output in unknown if output in behind and output not in inputs]
            wanted = [*filter(inputs.__contains__, unknown), *_spread(others)]
        elif is_same or not unknown or blind_rounds == _BLIND_ROUNDS:
            break
        else:
            blind_rounds += 1
            wanted = _spread(unknown)
        _logger.info("comparing %d tensors more, of %d, to find the first operation that differs", len(wanted), len(comparable))
        found |= both.measured(wanted)[2]
    difference = None
    if first is not None:
        placement = str(both.propagation.facts[first].placement)
        line = user_line(both.graph, first[0])
        difference = Difference(both.propagation.nodes[first[0]].op, name_of(*first), placement, found[first].apart, line)
    inside = Agreement({name_of(*output): measured for output, measured in found.items()})
    check = StepCheck(step, both.tolerance, results, variables, inside, len(comparable), difference)
    if not both.target.jit_compile:
        return check
    results, variables = both.ends()
    with_xla = dataclasses.replace(check, results=results, variables=variables, jit_compile=True)
    return dataclasses.replace(with_xla, only_with_xla=check.is_exact and not with_xla.is_exact)


def _spread(outputs: Sequence[Output]) -> list[Output]:
    """Returns some tensors that are evenly spread over all, with the last one."""
    step = -(-len(outputs) // _AT_ONCE) or 1
    return list(outputs[::-1][::step][::-1])


def _behind(output: Output, propagation: Propagation, ends: Set[Output] = frozenset()) -> Set[Output]:
    """Returns the tensors that a tensor depends on, without what is behind some others."""
    sources = propagation.sources

    def following(of: Output) -> Sequence[Output]:
        return () if of in ends else sources.get(of[0], ())

    return reached(sources.get(output[0], ()), following)


def _comparable(propagation: Propagation) -> list[Output]:
    """Returns the numeric tensors that have a whole."""
    found = []
    for node in propagation.traced.nodes:
        for port, static in enumerate(propagation.traced.statics[node.name]):
            facts = propagation.facts[node.name, port]
            is_whole = isinstance(facts.placement, Replicate) and propagation.plans[node.name].is_at_home
            if static.dtype in _NOT_COMPARED or not (isinstance(facts.placement, Shard | Partial) or is_whole):
                continue
            if node.op not in ("Placeholder", *_NOT_UNIQUE):
                found.append((node.name, port))
    return found
