"""Tell on which kind of machine this is, and how TensorFlow gets GPUs there."""

import dataclasses
import os
import platform


@dataclasses.dataclass(frozen=True)
class Platform:
    """Describes a kind of machine.

    Attributes:
        name: its name.
        advice: how TensorFlow gets GPUs there.
        has_cuda: whether TensorFlow can use GPUs of NVIDIA's there.
    """

    name: str
    advice: str = ""
    has_cuda: bool = True


COLAB = Platform("Colab", "Choose a GPU in Runtime > Change runtime type; Colab has one at most.")
KAGGLE = Platform("Kaggle", "Choose GPU T4 x2 in Settings > Accelerator, which are two GPUs.")
WSL = Platform("Linux in WSL", "Install NVIDIA's driver in Windows, none in WSL.")
WINDOWS = Platform("Windows", "TensorFlow uses no GPU in Windows itself: run the script in WSL.", has_cuda=False)
MACOS = Platform(
    "macOS", "TensorFlow itself uses no GPU on macOS, and keras_dp is not tested with tensorflow-metal.", has_cuda=False
)


def current_platform() -> Platform:
    """Returns the kind of this machine; without advice if there is nothing special about it."""
    if "COLAB_RELEASE_TAG" in os.environ:
        return COLAB
    if "KAGGLE_KERNEL_RUN_TYPE" in os.environ:
        return KAGGLE
    if "microsoft" in platform.release().lower():
        return WSL
    return {"Windows": WINDOWS, "Darwin": MACOS}.get(platform.system(), Platform(platform.system()))
