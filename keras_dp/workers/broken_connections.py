"""Read from TensorFlow's error which connection between two workers broke."""

import re

from keras_dp.workers.cluster import Cluster

# TensorFlow names the worker from which this one was receiving. Where that worker has only passed an error on, the workers
# follow from the first that failed to this one.
_SENDER = re.compile(r"from remote target (\S+) while calling")


def broken_connection(message: str, cluster: Cluster) -> str | None:
    """Returns a sentence about the connection that broke; None if the message tells of none.

    Args:
        message: the message of an error of a collective.
        cluster: the workers.
    """
    senders = [cluster.names.index(name) for name in _SENDER.findall(message) if name in cluster.names]
    if not senders:
        return None
    ends = sorted({senders[0], senders[1] if len(senders) > 1 else cluster.index})
    named = " and ".join(f"{i} ({cluster.addresses[i]})" for i in ends)
    return (
        f"The connection between workers {named} broke in the middle of a step, though all workers answer. What was under way "
        "is not sent again: all workers must start again."
    )
