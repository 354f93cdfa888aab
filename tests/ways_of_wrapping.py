"""List the ways in which tests of exactness wrap their models, and wrap models in one of them."""

import keras_dp
from keras_dp import trainer
from keras_dp.batches import input_strategy
from keras_dp.devices import variable_homes
from keras_dp.steps import slow_steps
from keras_dp.wrapping.one_state import own_of

# Packed copies, variables on several devices, two towers in turns on each device, towers that XLA compiles, and all defaults of
# GPUs at once. test_ways.py trains each kind of program in each of these. KERAS_DP_TEST_WAY=gpus and the like choose one for
# all tests of what is computed.
WAYS = {
    "plain": {},
    "packed": {"pack_copies": True},
    "sharded": {"parameter_device": "sharded"},
    "packed-sharded": {"pack_copies": True, "parameter_device": "sharded"},
    "slices": {"slices_per_device": 2},
    "xla": {},
    "gpus": {},
}
# These are for KERAS_DP_TEST_WAY alone: collectives between logical CPUs take longer than copies.
WHERE_ASKED_FOR = {
    "nccl": {"communication": "nccl"},
    "nccl-sharded": {"communication": "nccl", "parameter_device": "sharded"},
}
DEFAULTS_OF_GPUS = [trainer, input_strategy, slow_steps, variable_homes]  # all that ask whether the towers are GPUs
# Each test of what is computed runs in one of these, which its name chooses. Programs that XLA has compiled stay in memory for
# the life of a process, some 30 MB a test.
WITHOUT_XLA = ("plain", "packed", "sharded", "packed-sharded", "slices")
OF_RESULTS = {
    "test_accumulation",
    "test_compatibility_losses",
    "test_compatibility_metrics",
    "test_compatibility_models",
    "test_compatibility_optimizers",
    "test_made_in_the_trace",
    "test_optimizers",
    "test_partition_of_keras",
    "test_programs",
    "test_promise",
    "test_random_programs",
    "test_regressions",
    "test_retracing",
    "test_static_rows",
    "test_training_flag",
    "test_unknown_sizes",
}


def wrapped(model, *arguments, pack_copies=None, **named):
    """Wraps a model, and packs the copies between its towers or not. By default, they are packed between GPUs."""
    parallel = keras_dp.DataParallelModel(model, *arguments, **named)
    if pack_copies is not None:
        parallel.tower_steps.pack_copies = pack_copies
    return parallel


def wrap_in_the_way(name, monkeypatch):
    """Gives all wrapped models the defaults of a way, where a test does not say otherwise."""
    wrap, compile_towers = keras_dp.DataParallelModel.__init__, trainer.TowerTrainer.compiled
    defaults = dict((WAYS | WHERE_ASKED_FOR)[name])
    packs = defaults.pop("pack_copies", False)

    def with_defaults(self, *arguments, **named):
        # The third argument is the device of the variables.
        wrap(self, *arguments, **(defaults | named if len(arguments) < 3 else named))
        own_of(self).steps.pack_copies |= packs

    def with_xla(self, *arguments, **named):
        compile_towers(self, *arguments, **named)
        self.steps.jit_compile = True

    if name == "gpus":
        for module in DEFAULTS_OF_GPUS:
            monkeypatch.setattr(module, "are_gpus", lambda devices: True)
    elif name == "xla":
        monkeypatch.setattr(trainer.TowerTrainer, "compiled", with_xla)
    elif name != "plain":
        monkeypatch.setattr(keras_dp.DataParallelModel, "__init__", with_defaults)
