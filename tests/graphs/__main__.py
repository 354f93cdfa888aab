"""Write the signatures of the graphs of many programs on towers to a file, or compare two such files.

    PYTHONPATH=tests python -m graphs before.json        # then change the partitioner
    PYTHONPATH=tests python -m graphs after.json --than before.json

The programs are those of tests/programs on 2, 3 and 8 towers, with packed copies and variables on several devices in turn,
random programs with settings of their own, several workers and XLA among them, and the models of `keras-dp bench`.
"""

import argparse
import collections
import dataclasses
import functools
import itertools
import json
import os
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
from fuzz.drawing import draw_program
from fuzz.running import draw_setting, prepared
from fuzz.workers import InMemory, Meeting
from programs import adversarial, contrastive, distillation, generative, sequences, traps, vision  # noqa: F401
from programs.catalogue import PROGRAMS
from ways_of_wrapping import wrapped

import keras_dp
from graphs.signatures import recorded
from keras_dp.cli.models import BUILT_IN
from keras_dp.cli.synthetic import dataset

_OPTIONS = {"plain": {}, "packed": {"pack_copies": True}, "sharded": {"parameter_device": "sharded"}}
_WAYS = list(itertools.product(_OPTIONS, (2, 3, 8)))


def parsed():
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m graphs", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("out", type=Path, help="the file to write")
    parser.add_argument("--than", type=Path, help="a file that was written before")
    parser.add_argument("--ways", type=int, default=1, help=f"ways for each program of tests/programs; {len(_WAYS)} for all")
    parser.add_argument("--random", type=int, default=200, help="the number of random programs")
    return parser.parse_args()


def main():
    """Writes the signatures, and prints how they differ from earlier ones. Returns 1 if any does."""
    options = parsed()
    keras_dp.use_logical_cpus(9)
    keras.config.set_floatx("float64")
    found = {}
    for name, write in programs(options):
        with recorded() as signatures:
            keras.utils.set_random_seed(3)
            try:
                write()
                failure = None
            except Exception as error:
                failure = type(error).__name__
        found[name] = {"failure": failure, "graphs": list(map(dataclasses.asdict, signatures))}
        keras.utils.clear_session()
    options.out.write_text(json.dumps(found))
    if options.than is None:
        print(f"{len(found)} programs, {sum(len(one['graphs']) for one in found.values())} graphs")
        return 0
    return differences(json.loads(options.than.read_text()), found)


def programs(options):
    """Yields the name of each program and way, and a function that writes its graphs."""
    for i, (name, of_program) in enumerate(PROGRAMS.items()):
        for j in range(i, i + options.ways):
            way, towers = _WAYS[j % len(_WAYS)]
            yield f"{name}, {way}, {towers} towers", functools.partial(trained, of_program, towers, _OPTIONS[way])
    for seed in range(options.random):
        yield f"random program {seed}", functools.partial(partitioned, seed)
    for name, towers in itertools.product(BUILT_IN, (2, 8)):
        if name != "resnet50" or towers == 8:
            yield f"{name}, {towers} towers", functools.partial(one_step, name, towers)


def trained(of_program, towers, options):
    """Trains a program on towers."""
    build, script = of_program()
    script(wrapped(build(), devices=towers, **options))


def partitioned(seed):
    """Partitions a random program in its setting, for each of its workers."""
    program, setting = draw_program(seed), draw_setting(seed)
    devices = [f"CPU:{1 + i}" for i in range(setting.towers)]
    meeting = Meeting(setting.workers)
    for index in range(setting.workers):
        worker = InMemory(meeting, index) if setting.workers > 1 else None
        prepared(program, setting, [], devices, worker)


def one_step(name, towers):
    """Takes one step of a model of `keras-dp bench`."""
    keras.config.set_floatx("float32")
    try:
        model = keras_dp.DataParallelModel(BUILT_IN[name].build(), devices=towers)
        model.compile(optimizer="adam", **BUILT_IN[name].objective())
        model.fit(dataset(model, 8), steps_per_epoch=1, verbose=0)
    finally:
        keras.config.set_floatx("float64")


def differences(before, after):
    """Prints the programs whose graphs have changed, and how. Returns 1 if any has."""
    changed = 0
    for name in before.keys() | after.keys():
        one, other = (found.get(name, {"failure": "missing", "graphs": []}) for found in (before, after))
        if [graph["digest"] for graph in one["graphs"]] == [graph["digest"] for graph in other["graphs"]]:
            continue
        changed += 1
        print(f"{name}: {len(one['graphs'])} and {len(other['graphs'])} graphs, {one['failure']} and {other['failure']}")
        for old, new in zip(one["graphs"], other["graphs"], strict=False):
            counts = collections.Counter(new["operations"])
            counts.subtract(old["operations"])
            text = ", ".join(f"{number:+} {operation}" for operation, number in sorted(counts.items()) if number)
            if old["digest"] != new["digest"]:
                print(f"    {text or 'the same operations, connected otherwise'}")
    print(f"{changed} of {len(after)} programs differ")
    return min(changed, 1)


if __name__ == "__main__":
    raise SystemExit(main())
