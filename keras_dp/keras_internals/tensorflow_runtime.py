"""Start TensorFlow's server and abort its collectives."""

import tensorflow as tf
from tensorflow.core.protobuf import tensorflow_server_pb2
from tensorflow.python.eager import context


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
