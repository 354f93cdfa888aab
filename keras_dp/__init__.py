"""Train Keras 3 models on several devices with one device's result."""

from typing import TYPE_CHECKING, Any

from keras_dp.timer_slack import shorten_timer_slack
from keras_dp.version import __version__ as __version__

if TYPE_CHECKING:
    from keras_dp.api import *  # noqa: F403

__all__ = [
    "DataParallelModel",
    "DataParallelOptimizer",
    "SyncBatchNormalization",
    "WorkerGroup",
    "WorkerLostError",
    "callbacks",
    "check_step",
    "communication_report",
    "connect_workers",
    "convert_batch_norm",
    "explain",
    "find_slices",
    "optimizers",
    "recalibrate_batch_norm",
    "report",
    "schedules",
    "use_logical_cpus",
]


# Models are often made, and with them TensorFlow's threads, before the first public name is used.
shorten_timer_slack()


def __getattr__(name: str) -> Any:
    """Imports Keras and TensorFlow when the first of the public names is used: the command `keras-dp` answers at once."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from keras_dp import api

    globals().update({public: getattr(api, public) for public in __all__})
    return globals()[name]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
