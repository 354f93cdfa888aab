"""Prepare the devices of a part: GPUs, cards that are split into several, or logical CPUs where there is no GPU."""

import os
import shutil
import subprocess

import tensorflow as tf

import keras_dp

# Without a known size of the cards, a piece of a card is small enough for four pieces of any.
SAFE_MEGABYTES = 1536
# CUDA's own context and libraries also need memory.
USED_SHARE = 0.75


def prepare(record, count):
    """Makes `count` devices for towers, before TensorFlow has started, and returns their names.

    Cards are used as they are if there are enough, and are split into logical GPUs otherwise. Memory grows with use on whole
    cards; TensorFlow cannot do that on pieces of a card, so each piece has a limit. Neighbours are on different cards as far as
    possible.
    """
    cards = tf.config.list_physical_devices("GPU")
    if not cards:
        keras_dp.use_logical_cpus(count)
        record.devices(f"{count} logical CPU{'s' if count > 1 else ''}", gpus=False)
        return [f"CPU:{index}" for index in range(count)]
    if len(cards) >= count:
        for card in cards:
            tf.config.experimental.set_memory_growth(card, True)
        record.devices(f"{count} of {len(cards)} GPUs" if count < len(cards) else f"{count} GPUs", gpus=True)
        return [f"GPU:{index}" for index in range(count)]
    pieces = [len(range(index, count, len(cards))) for index in range(len(cards))]
    megabytes = _free_megabytes()
    for card, number in zip(cards, pieces, strict=True):
        limit = int(USED_SHARE * megabytes / number) if megabytes else SAFE_MEGABYTES
        piece = tf.config.LogicalDeviceConfiguration(memory_limit=limit)
        tf.config.set_logical_device_configuration(card, [piece] * number)
    record.devices(f"{count} logical GPUs on {len(cards)} card{'s' if len(cards) > 1 else ''}", gpus=True)
    # TensorFlow numbers the pieces of the first card first.
    numbered = [(piece, card) for card, number in enumerate(pieces) for piece in range(number)]
    return [f"GPU:{index}" for index in sorted(range(count), key=numbered.__getitem__)]


def use_exact_arithmetic():
    """Turns TensorFloat-32 off, which rounds the factors of float32 products to 10 bits."""
    tf.config.experimental.enable_tensor_float_32_execution(False)


def ask_driver(*questions):
    """Asks the driver about the cards that CUDA_VISIBLE_DEVICES shows, in its order, what `nvidia-smi --help-query-gpu` lists.

    Returns the answers for each card; nothing if there is no driver, or it knows a question no more.
    """
    if shutil.which("nvidia-smi") is None:
        return []
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    cards = [f"--id={visible}"] if visible else []
    command = ["nvidia-smi", f"--query-gpu={','.join(questions)}", "--format=csv,noheader,nounits", *cards]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=30)
    return [line.split(", ") for line in answer.stdout.splitlines()] if answer.returncode == 0 else []


def _free_megabytes():
    """Returns the free memory of the fullest card, or None if it is not known."""
    free = [answer for (answer,) in ask_driver("memory.free")]
    return min(map(float, free)) if free and all(answer.isdecimal() for answer in free) else None
