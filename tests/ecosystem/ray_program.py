"""Search with Ray Tune and train with Ray Train, for plain and for wrapped models, and write down what Ray has found.

    python ray_program.py directory_for_results directory_for_servers

test_ray.py runs this program in a process group of its own, so that all of Ray's servers end with it.
"""

import json
import sys
import tempfile
from pathlib import Path

import keras
import ray
import ray.train
import ray.tune
from classification import classifier, two_classes
from ray.train.tensorflow import TensorflowTrainer
from ray.train.tensorflow.keras import ReportCheckpointCallback
from ray.tune.schedulers import ASHAScheduler

import keras_dp

EPOCHS = 4


class Report(keras.callbacks.Callback):
    """Reports each epoch and the model to Ray Tune, in whose functions Ray's own callback is refused since Ray 2.51."""

    def on_epoch_end(self, epoch, logs=None):
        with tempfile.TemporaryDirectory() as directory:
            self.model.save(Path(directory, "model.keras"))
            ray.tune.report(logs, checkpoint=ray.tune.Checkpoint.from_directory(directory))


def fitted(wrapped, learning_rate, callback):
    data = two_classes()
    model = classifier(wrapped)
    model.optimizer.learning_rate = learning_rate
    model.fit(*data, batch_size=8, epochs=EPOCHS, validation_data=data, callbacks=[callback], verbose=0)


def trial(config):
    keras_dp.use_logical_cpus(2)
    fitted(config["wrapped"], config["learning_rate"], Report())


def worker():
    keras_dp.use_logical_cpus(2)
    keras_dp.connect_workers()
    fitted("across workers", 0.1, ReportCheckpointCallback())


def predictions(checkpoint):
    """Loads the model in a checkpoint, and returns its outputs for the first rows."""
    return keras.models.load_model(Path(checkpoint.path, "model.keras")).predict(two_classes()[0][:5], verbose=0).tolist()


def searched(wrapped, directory):
    """Searches for the learning rate, one trial after the other, and stops a trial that is worse than those before it."""
    scheduler = ASHAScheduler(grace_period=1, max_t=EPOCHS, reduction_factor=2)
    objective = {"metric": "val_loss", "mode": "min"}
    tuner = ray.tune.Tuner(
        trial,
        param_space={"wrapped": wrapped, "learning_rate": ray.tune.grid_search([0.1, 0.001])},
        tune_config=ray.tune.TuneConfig(scheduler=scheduler, max_concurrent_trials=1, reuse_actors=True, **objective),
        run_config=ray.tune.RunConfig(storage_path=directory, name=f"wrapped_{wrapped}", verbose=0),
    )
    results = tuner.fit()
    return {
        "trials": [result.metrics_dataframe[["loss", "val_loss", "val_accuracy"]].to_dict("list") for result in results],
        "best": results.get_best_result().config["learning_rate"],
        "predictions": predictions(results.get_best_result().checkpoint),
    }


def trained(directory):
    """Trains a wrapped model on two workers of Ray Train."""
    trainer = TensorflowTrainer(
        worker,
        scaling_config=ray.train.ScalingConfig(num_workers=2),
        run_config=ray.train.RunConfig(storage_path=directory, name="train"),
    )
    result = trainer.fit()
    return {"reports": [metrics for _, metrics in result.best_checkpoints], "predictions": predictions(result.checkpoint)}


if __name__ == "__main__":
    out, servers = sys.argv[1:]
    small = {"num_cpus": 2, "include_dashboard": False, "object_store_memory": 80_000_000}
    ray.init("local", **small, _temp_dir=servers, _node_ip_address="127.0.0.1")
    found = {"plain": searched(False, out), "wrapped": searched(True, out), "workers": trained(out)}
    ray.shutdown()
    Path(out, "found.json").write_text(json.dumps(found))
