"""List the devices and the versions."""

import subprocess

import tensorflow as tf

from gpu.devices import ask_driver
from keras_dp.cli import environment

QUESTIONS = ("name", "memory.total", "memory.free", "compute_cap", "driver_version", "pci.bus_id")


def run(record):
    """Lists versions, the build of TensorFlow, the GPUs that TensorFlow sees, and the cards that the driver knows."""
    facts = environment.environment()
    cards = tf.config.list_physical_devices("GPU")
    record.devices(f"{len(cards)} GPU{'s' if len(cards) > 1 else ''}" if cards else "the CPU", gpus=bool(cards))
    record.finding(
        f"{', '.join(facts['gpus']) or 'no GPU'}; TensorFlow {facts['tensorflow']}, Keras {facts['keras']}, "
        f"keras_dp {facts['keras_dp']}"
    )
    for name, value in facts.items():
        if name != "gpus":
            record.row("Versions", name=name, value=str(value))
    build = tf.sysconfig.get_build_info()
    for name in ("is_cuda_build", "is_rocm_build", "cuda_version", "cudnn_version", "cuda_compute_capabilities"):
        value = build.get(name, "-")
        record.row("TensorFlow's build", name=name, value=" ".join(value) if isinstance(value, list) else str(value))
    capabilities = build.get("cuda_compute_capabilities", [])
    for card in cards:
        details = tf.config.experimental.get_device_details(card)
        major, minor = details.get("compute_capability", (0, 0))
        record.row(
            "GPUs that TensorFlow sees",
            gpu=card.name.split("device:")[-1],
            name=details.get("device_name", "-"),
            compute_capability=f"{major}.{minor}",
            compiled_for=_compiled_for(major, minor, capabilities),
        )
    for answers in ask_driver(*QUESTIONS):
        record.row("Cards that the driver knows, memory in MB", **dict(zip(QUESTIONS, answers, strict=True)))
    if cards:
        topology = subprocess.run(["nvidia-smi", "topo", "-m"], capture_output=True, text=True, timeout=30)
        for line in topology.stdout.splitlines():
            if line.startswith("GPU"):
                record.remark(f"how cards are connected: `{' '.join(line.split())}`")


def _compiled_for(major, minor, capabilities):
    """Says whether TensorFlow has code for a GPU, or its driver has to compile it when TensorFlow starts."""
    # Code runs on all GPUs of its major version that are not older. TensorFlow's "compute_90" is code for 9.0, too, beside a
    # program that the driver can compile for later GPUs.
    exact = [name.removeprefix("sm_").removeprefix("compute_") for name in capabilities]
    if any(int(name[:-1]) == major and int(name[-1]) <= minor for name in exact if name.isdecimal()):
        return "yes"
    return "no: the driver compiles at the first start, which may take minutes"
