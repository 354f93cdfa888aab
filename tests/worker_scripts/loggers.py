"""Train with the loggers of other projects, which the chief alone gets.

loggers.py DIRECTORY
"""

import json
import os
import sys

import keras
import mlflow
import wandb
from classification import TOWERS, classifier, two_classes
from dvclive import Live
from dvclive.keras import DVCLiveCallback
from tqdm.keras import TqdmCallback
from wandb.integration.keras import WandbMetricsLogger, WandbModelCheckpoint

import keras_dp

os.chdir(sys.argv[1])  # Each tool writes here.
keras_dp.use_logical_cpus(TOWERS)
workers = keras_dp.connect_workers()
callbacks = [keras.callbacks.EarlyStopping(patience=3)]
if workers.is_chief:
    mlflow.set_tracking_uri("sqlite:///mlflow.db")
    mlflow.autolog(log_model_signatures=False)
    run = wandb.init(mode="offline", settings=wandb.Settings(x_disable_stats=True))
    live = Live(save_dvc_exp=False)
    callbacks += [WandbMetricsLogger(), WandbModelCheckpoint("{epoch}.keras"), DVCLiveCallback(live=live), TqdmCallback()]
model = classifier(wrapped=True)
history = model.fit(*two_classes(), batch_size=7, epochs=2, validation_split=0.2, callbacks=callbacks, verbose=0).history
print("last", json.dumps({name: values[-1] for name, values in history.items()}), flush=True)
if workers.is_chief:
    (of_mlflow,) = mlflow.search_runs(output_format="list")
    (model_of_mlflow,) = mlflow.search_logged_models(output_format="list")
    mlflow.tensorflow.load_model(model_of_mlflow.model_uri)
    of_dvclive = live.read_latest()
    logged = {
        "wandb": {name: run.summary[f"epoch/{name}"] for name in history},
        "dvclive": of_dvclive["train"] | {f"val_{name}": value for name, value in of_dvclive["eval"].items()},
        "mlflow": of_mlflow.data.metrics,
    }
    print("logged", json.dumps(logged), flush=True)
