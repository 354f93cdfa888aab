"""Start TensorFlow's server, abort its collectives, look into datasets, and ask for kernels and their costs."""

import functools
from collections.abc import Mapping
from typing import Any

import tensorflow as tf
from tensorflow.core.framework import graph_pb2
from tensorflow.core.protobuf import device_properties_pb2, meta_graph_pb2, tensorflow_server_pb2
from tensorflow.python.eager import context
from tensorflow.python.framework import kernels, op_def_registry
from tensorflow.python.grappler import cluster, item
from tensorflow.python.ops import summary_ops_v2


def start_server(jobs: dict[str, list[str]], job: str, task: int, leader: str) -> None:
    """Starts TensorFlow and its gRPC server in this process, as one of several that run collectives together.

    Does the same as `tf.distribute.MultiWorkerMirroredStrategy`, but without TensorFlow's coordination service, which gives up
    a worker that is silent for ten seconds.

    Args:
        jobs: the addresses of each job.
        job: the job of this process.
        task: the number of this process in its job.
        leader: the name of the task in which the other tasks look up the participants.

    Raises:
        RuntimeError: if TensorFlow has started already.
        tf.errors.OpError: if the server cannot be started.
    """
    tensorflow = context.context()
    tensorflow.configure_collective_ops(leader, scoped_allocator_enabled_ops=(), device_filters=(f"/job:{job}/task:{task}",))
    server = tensorflow_server_pb2.ServerDef(
        cluster=tf.train.ClusterSpec(jobs).as_cluster_def(),
        default_session_config=tensorflow.config,
        job_name=job,
        task_index=task,
        protocol="grpc",
    )
    tensorflow.enable_collective_ops(server)
    tensorflow.ensure_initialized()


def abort_collectives(reason: str) -> None:
    """Makes all running and future collectives of this process fail."""
    context.context().abort_collective_ops(tf.errors.UNAVAILABLE, reason)


def before_prefetch(dataset: tf.data.Dataset) -> tuple[tf.data.Dataset, int] | None:
    """Returns the dataset that a dataset reads ahead, and how many of its elements; None if it does not end with a prefetch."""
    # In the debug mode of tf.data there are no such datasets.
    ends_with_prefetch = isinstance(dataset, type(dataset.prefetch(1))) and hasattr(dataset, "_buffer_size")
    return (dataset._input_dataset, int(dataset._buffer_size)) if ends_with_prefetch else None


def is_collecting_graphs() -> bool:
    """Returns whether TensorFlow collects the graphs that it runs, as `tf.summary.trace_on` asks."""
    return summary_ops_v2._current_trace_context is not None


@functools.cache
def registered_kernels(operation_type: str) -> tuple[Any, ...]:
    """Returns the KernelDefs of an operation for all kinds of devices, of which this machine may have none."""
    return tuple(kernels.get_registered_kernels_for_op(operation_type).kernel)


@functools.cache
def definition_of(operation_type: str) -> Any:
    """Returns the OpDef of an operation."""
    return op_def_registry.get(operation_type)


class VirtualCluster:
    """Calculates what a graph costs on devices that are only described, with TensorFlow's analytical cost model.

    Args:
        graph: a GraphDef whose nodes stand on the devices.
        wanted: the names of the tensors and operations that must run; all others are left out.
        devices: the properties of each device, as fields of a DeviceProperties, by the device's whole name.
    """

    def __init__(self, graph: graph_pb2.GraphDef, wanted: list[str], devices: Mapping[str, Mapping[str, Any]]):
        meta_graph = meta_graph_pb2.MetaGraphDef(graph_def=graph)
        meta_graph.collection_def["train_op"].node_list.value.extend(wanted)
        described = [
            device_properties_pb2.NamedDevice(name=name, properties=device_properties_pb2.DeviceProperties(**fields))
            for name, fields in devices.items()
        ]
        self._item = item.Item(meta_graph)
        self._cluster = cluster.Cluster(devices=described, disable_detailed_stats=False)

    def run(self) -> tuple[list[Any], float]:
        """Returns an OpPerformance for each operation, with times in nanoseconds, and the time of the graph in seconds."""
        costs, seconds, _ = self._cluster.MeasureCosts(self._item)
        return list(costs), seconds
