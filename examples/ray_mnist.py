"""Train a multilayer perceptron on MNIST with Ray Train, on several workers of one machine or of a Ray cluster.

    python examples/ray_mnist.py --workers 2
    python examples/ray_mnist.py --workers 8 --address auto --out /shared/ray_mnist

Ray starts the workers, sets TF_CONFIG in each, and calls `train` there. This function is plain Keras, except for the lines
marked `# keras_dp` and `# ray`. To install Ray, run pip install ".[ray]", on all nodes of a cluster.
"""

import argparse
import tempfile
from pathlib import Path

import keras
import ray
import ray.train
import tensorflow as tf
from command_line import HelpFormatter
from data import mnist
from ray.train.tensorflow import TensorflowTrainer

import keras_dp  # keras_dp


def train(config):
    workers = keras_dp.connect_workers()  # keras_dp
    (x_train, y_train), (x_test, y_test) = ray.get(config["digits"])  # ray
    keras.utils.set_random_seed(config["seed"])

    model = keras.Sequential(
        [
            keras.Input((28, 28, 1)),
            keras.layers.Flatten(),
            keras.layers.Dense(128, activation="relu"),
            keras.layers.Dense(10, activation="softmax"),
        ]
    )
    model = keras_dp.DataParallelModel(model)  # keras_dp
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])

    verbose = 2 if workers.is_chief else 0  # keras_dp
    model.fit(x_train, y_train, batch_size=config["batch_size"], epochs=config["epochs"], verbose=verbose)
    scores = model.evaluate(x_test, y_test, batch_size=config["batch_size"], verbose=0, return_dict=True)

    # Ray keeps the first worker's report and its checkpoint, and all workers must report.
    with tempfile.TemporaryDirectory() as directory:  # ray
        model.save(Path(directory, "model.keras"))
        checkpoint = ray.train.Checkpoint.from_directory(directory) if workers.is_chief else None  # ray
        ray.train.report(scores, checkpoint=checkpoint)  # ray


parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter)
parser.add_argument("--workers", type=int, default=2, help="number of worker processes")
parser.add_argument("--address", help="address of a Ray cluster, or auto (default: start Ray on this machine)")
parser.add_argument("--epochs", type=int, default=3, help="how often to go through the images")
parser.add_argument("--batch-size", type=int, default=128, help="images in a global batch")
parser.add_argument(
    "--out",
    metavar="DIRECTORY",
    default="results/ray_mnist",
    help="directory for the model; all nodes must reach it",
)
parser.add_argument("--seed", type=int, default=0, help="seed of the weights and the order of the images")
mnist.add_argument(parser)
args = parser.parse_args()

if args.address:
    ray.init(args.address)
else:
    ray.init("local", num_cpus=args.workers, include_dashboard=False)
tf.config.set_visible_devices([], "GPU")  # this process trains nothing

gpus = ray.cluster_resources().get("GPU", 0)
trainer = TensorflowTrainer(
    train,
    train_loop_config={**vars(args), "digits": ray.put(mnist.load(args.data))},
    scaling_config=ray.train.ScalingConfig(num_workers=args.workers, use_gpu=gpus >= args.workers),
    run_config=ray.train.RunConfig(storage_path=str(Path(args.out).resolve())),
)
result = trainer.fit()
ray.shutdown()  # it returns when the workers' output has arrived

print(f"model in {result.checkpoint.path}/model.keras")
print(f"test accuracy {100 * result.metrics['accuracy']:.2f} %")
