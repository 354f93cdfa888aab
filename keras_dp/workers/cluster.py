"""Find the workers' addresses in TF_CONFIG or Slurm's variables."""

import json
import os
import re
from dataclasses import dataclass
from typing import Any, NamedTuple

import tensorflow as tf

EXPECTED = (
    'TF_CONFIG names every worker and says which one this process is, as {"cluster": {"worker": ["host0:2222", "host1:2222"]}, '
    '"task": {"type": "worker", "index": 0}}.'
)

SLURM_PORT = 8888  # of the first worker on each node, as in tf.distribute.cluster_resolver.SlurmClusterResolver
_MOST_SLURM_TASKS_PER_NODE = 4096
_MOST_SLURM_NODES = 2**16

_JOBS = ("chief", "worker")
_ADDRESS = re.compile(r"(\[[0-9a-fA-F:.%]+\]|[^\s:/\[\]]+):(\d{1,5})")


@dataclass(frozen=True)
class Cluster:
    """The W workers.

    Attributes:
        jobs: the addresses, "host:port", by the job's name: "worker", and "chief" if there is such a job.
        job: the job of this process.
        task: the number of this process in its job.
        source: the origin of the addresses, "TF_CONFIG" or "Slurm".
    """

    jobs: dict[str, list[str]]
    job: str
    task: int
    source: str = "TF_CONFIG"

    @property
    def names(self) -> list[str]:
        """TensorFlow's names of the W workers; the chief is the first."""
        return [f"/job:{job}/replica:0/task:{i}" for job in _JOBS for i in range(len(self.jobs.get(job, ())))]

    @property
    def addresses(self) -> list[str]:
        """The W addresses; the chief's is the first."""
        return [address for job in _JOBS for address in self.jobs.get(job, ())]

    @property
    def index(self) -> int:
        """The number of this process among all W workers; 0 for the chief."""
        return self.task + (len(self.jobs.get("chief", ())) if self.job == "worker" else 0)


def find_cluster() -> Cluster | None:
    """Returns the cluster that the environment describes; None for a single process.

    TF_CONFIG is the convention of TensorFlow, Kubernetes (TFJob) and Ray. Without it, a Slurm job step's variables are read.

    Raises:
        ValueError: if TF_CONFIG is malformed, or Slurm's variables are missing or contradict each other.
    """
    if os.environ.get("TF_CONFIG", "").strip():
        return _from_tf_config(os.environ["TF_CONFIG"])
    if os.environ.get("SLURM_STEP_NUM_TASKS", "1") != "1":
        return _from_slurm()
    return None


class Launcher(NamedTuple):
    """Describes a launcher that has started several processes.

    Attributes:
        name: its name.
        variable: the environment variable that holds the number of processes.
        processes: the number of processes.
    """

    name: str
    variable: str
    processes: int


# The variables with the number of processes. Horovod may start its processes with Open MPI, so it comes first.
_LAUNCHERS = {
    "HOROVOD_SIZE": "horovodrun",
    "OMPI_COMM_WORLD_SIZE": "mpirun (Open MPI)",
    "PMI_SIZE": "mpiexec (PMI)",
    "WORLD_SIZE": "torchrun",
}


def other_launcher() -> Launcher | None:
    """Returns the launcher that has started several processes without describing them in TF_CONFIG; None if there is none."""
    if os.environ.get("TF_CONFIG", "").strip():
        return None
    for variable, name in _LAUNCHERS.items():
        said = os.environ.get(variable, "")
        # Containers may set WORLD_SIZE for other reasons: PyTorch's processes have their rank beside it.
        if said.isdecimal() and int(said) > 1 and (variable != "WORLD_SIZE" or "RANK" in os.environ):
            return Launcher(name, variable, int(said))
    return None


def _from_tf_config(text: str) -> Cluster | None:
    def refuse(reason: str) -> ValueError:
        return ValueError(f"{reason} {EXPECTED} Received: TF_CONFIG={text}")

    try:
        config = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise refuse(f"TF_CONFIG is not JSON: {error}.") from None
    if not isinstance(config, dict):
        raise refuse("TF_CONFIG is not a JSON object.")
    jobs = config.get("cluster") or {}
    if not isinstance(jobs, dict) or not all(_is_list_of_text(addresses) for addresses in jobs.values()):
        raise refuse('"cluster" does not map the names of jobs to lists of addresses.')
    jobs = {job: addresses for job, addresses in jobs.items() if addresses}
    if not jobs and config.get("sparseCluster"):
        raise refuse('"sparseCluster" does not name all workers: leave enableDynamicWorker out of the TFJob.')
    if not jobs:
        return None
    unknown = sorted(set(jobs) - set(_JOBS))
    if unknown:
        raise refuse(f'"cluster" has the job(s) {", ".join(unknown)}; keras_dp has workers, and no parameter servers.')
    addresses = [address for job in jobs.values() for address in job]
    for address in addresses:
        matched = _ADDRESS.fullmatch(address)
        if matched is None or not 0 < int(matched[2]) < 2**16:
            raise refuse(f'"cluster" has {address!r}, which is not of the form host:port.')
    if len(set(addresses)) != len(addresses) or len(jobs.get("chief", ())) > 1:
        raise refuse('"cluster" names an address twice, or has more than one chief.')
    task = config.get("task")
    job, index = (str(task.get("type")), task.get("index")) if isinstance(task, dict) else ("", None)
    numbers = {str(number): number for number in range(len(jobs.get(job, ())))}
    number = numbers.get(str(index))
    if number is None:
        raise refuse(f'"task" is not one of the {len(addresses)} of "cluster".')
    return Cluster(jobs, job, number) if len(addresses) > 1 else None


def _from_slurm() -> Cluster:
    try:
        _refuse_long_lists()
        # Slurm assigns the GPUs (--gpus-per-task), not the resolver. So the resolver assumes one GPU for each task.
        resolver = tf.distribute.cluster_resolver.SlurmClusterResolver(
            port_base=SLURM_PORT, gpus_per_node=_MOST_SLURM_TASKS_PER_NODE, gpus_per_task=1, auto_set_gpu=False
        )
        addresses = resolver.cluster_spec().job_tasks("worker")
        wrong = [address for address in addresses if _ADDRESS.fullmatch(address) is None]
        if wrong:
            raise ValueError(f"{wrong[0]!r} is not of the form host:port")
        # The resolver sorts nodes by name, but Slurm numbers tasks in another order. So this task is found by its address.
        own = f"{os.environ['SLURMD_NODENAME']}:{SLURM_PORT + int(os.environ['SLURM_LOCALID'])}"
        return Cluster({"worker": addresses}, "worker", addresses.index(own), source="Slurm")
    except (KeyError, RuntimeError, ValueError) as error:
        reason = f"{error} is missing" if isinstance(error, KeyError) else error
        received = {name: value for name, value in sorted(os.environ.items()) if name.startswith("SLURM")}
        raise ValueError(
            f"Slurm's variables do not describe this step: {reason}. Start the workers with srun, one task for each, or set "
            f"TF_CONFIG. Received: {received}"
        ) from None


def _refuse_long_lists() -> None:
    """Raises a ValueError if Slurm's lists name more nodes than a job can have: the resolver would write them all out."""
    # Names of nodes may hold hyphens and numbers, too.
    in_brackets = re.findall(r"\[([^\]]*)", os.environ.get("SLURM_STEP_NODELIST", ""))
    nodes = re.findall(r"(\d+)-(\d+)", ",".join(in_brackets))
    repetitions = re.findall(r"x(\d+)", os.environ.get("SLURM_STEP_TASKS_PER_NODE", ""))
    named = max(sum(int(last) - int(first) + 1 for first, last in nodes), sum(map(int, repetitions)))
    if named > _MOST_SLURM_NODES:
        raise ValueError(f"they name {named} nodes, of at most {_MOST_SLURM_NODES}")


def _is_list_of_text(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)
