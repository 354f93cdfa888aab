"""`find_cluster` finds all workers, and this process among them, from TF_CONFIG or from Slurm's variables."""

import json
import os
import re

import pytest

from keras_dp.workers.cluster import EXPECTED, SLURM_PORT, Cluster, find_cluster

TWO = ["alpha:2222", "beta:2222"]


@pytest.fixture(autouse=True)
def empty_environment(monkeypatch):
    """Removes all variables that name a cluster, so that only those of the test remain."""
    for name in os.environ:
        if name == "TF_CONFIG" or name.startswith("SLURM"):
            monkeypatch.delenv(name)


@pytest.fixture
def find(monkeypatch):
    """Returns a function that finds the cluster from TF_CONFIG, given as text or as an object for JSON."""

    def find(config):
        monkeypatch.setenv("TF_CONFIG", config if isinstance(config, str) else json.dumps(config))
        return find_cluster()

    return find


def config(cluster, kind="worker", index=0, **more):
    return {"cluster": cluster, "task": {"type": kind, "index": index}, **more}


@pytest.mark.parametrize(
    "value",
    [
        *("", "  ", "{}", '{"cluster": {}}', '{"cluster": null, "task": null}', '{"cluster": {"worker": []}}'),
        '{"task": {"type": "worker", "index": 0}}',
        config({"worker": ["alpha:2222"]}),
        config({"chief": ["alpha:2222"]}, "chief"),
        config({"chief": ["alpha:2222"], "worker": []}, "chief"),
    ],
)
def test_one_process(find, value):
    assert find(value) is None


CHIEF = {"worker": TWO, "chief": ["gamma:2222"]}


@pytest.mark.parametrize(
    ("jobs", "kind", "task", "index"),
    [
        *(({"worker": TWO}, "worker", 0, 0), ({"worker": TWO}, "worker", "1", 1)),
        # The chief is the first.
        *((CHIEF, "chief", 0, 0), (CHIEF, "worker", 0, 1), (CHIEF, "worker", 1, 2)),
        ({"worker": ["127.0.0.1:1", "127.0.0.1:65535"]}, "worker", 1, 1),
        ({"worker": ["[::1]:2222", "[2001:db8::2]:2222"]}, "worker", 1, 1),
        ({"worker": ["train-worker-0.default.svc:2222", "train-worker-1.default.svc:2222"]}, "worker", 1, 1),
    ],
)
def test_all_workers_are_known_to_each(find, jobs, kind, task, index):
    cluster = find(config(jobs, kind, task, environment="cloud"))  # as Kubernetes' training operator writes it
    assert cluster == Cluster(jobs, kind, int(task))
    assert cluster.index == index
    assert cluster.addresses == [*jobs.get("chief", []), *jobs["worker"]]
    assert cluster.names == [f"/job:{job}/replica:0/task:{i}" for job in sorted(jobs) for i in range(len(jobs[job]))]


SPARSE = {"sparseCluster": {"worker": {"1": "beta:2222"}, "ps": []}, "task": {"type": "worker", "index": 1}}
NOT_A_MAP = '"cluster" does not map the names of jobs to lists of addresses.'
NOT_ONE_OF_TWO = '"task" is not one of the 2 of "cluster".'
TWICE = '"cluster" names an address twice, or has more than one chief.'


def not_an_address(text):
    return f'"cluster" has {text!r}, which is not of the form host:port.'


def unknown_jobs(names):
    return f'"cluster" has the job(s) {names}; keras_dp has workers, and no parameter servers.'


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("worker 0 of 2", "TF_CONFIG is not JSON: Expecting value: line 1 column 1 (char 0)."),
        ("[]", "TF_CONFIG is not a JSON object."),
        (config("alpha:2222,beta:2222"), NOT_A_MAP),
        (config({"worker": "alpha:2222"}), NOT_A_MAP),
        (config({"worker": ["alpha:2222", 2222]}), NOT_A_MAP),
        (config({"ps": ["gamma:2222"], "evaluator": ["delta:2222"], "worker": TWO}), unknown_jobs("evaluator, ps")),
        (SPARSE, '"sparseCluster" does not name all workers: leave enableDynamicWorker out of the TFJob.'),
        (config({"chief": ["alpha:2222"], "worker": TWO}), TWICE),
        (config({"chief": TWO, "worker": ["gamma:2222"]}), TWICE),
        *(
            (config({"worker": ["alpha:2222", address]}), not_an_address(address))
            for address in ("beta", ":2222", "beta:0", "beta:65536", " beta:2222", "grpc://beta:2222", "::1:2223", "[::1]")
        ),
        (config({"worker": TWO}, index=2), NOT_ONE_OF_TWO),
        (config({"worker": TWO}, index=True), NOT_ONE_OF_TWO),
        (config({"worker": TWO}, kind="chief"), NOT_ONE_OF_TWO),
        ({"cluster": {"worker": TWO}}, NOT_ONE_OF_TWO),
    ],
)
def test_malformed(find, value, reason):
    with pytest.raises(ValueError, match=f"^{re.escape(reason)}") as error:
        find(value)
    received = value if isinstance(value, str) else json.dumps(value)
    assert str(error.value).endswith(f" {EXPECTED} Received: TF_CONFIG={received}")


@pytest.fixture
def step(monkeypatch):
    """Returns a function that sets the variables of Slurm for a task, `rank`, of a job step with the nodes of all tasks."""

    def set_variables(node_list, tasks_per_node, tasks, rank=0):
        variables = {
            "SLURM_STEP_NUM_TASKS": str(len(tasks)),
            "SLURM_STEP_NODELIST": node_list,
            "SLURM_STEP_TASKS_PER_NODE": tasks_per_node,
            "SLURM_PROCID": str(rank),
            "SLURMD_NODENAME": tasks[rank],
            "SLURM_LOCALID": str(tasks[:rank].count(tasks[rank])),
        }
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    return set_variables


OF_TWO = ("node[2,10]", "1(x2)", ["node2", "node10"])


@pytest.mark.parametrize(
    ("node_list", "tasks_per_node", "tasks", "addresses"),
    [
        # Slurm's order is not that of the alphabet.
        (*OF_TWO, ["node10:8888", "node2:8888"]),
        # srun --distribution=cyclic
        ("node[2,10]", "2(x2)", ["node2", "node10"] * 2, ["node10:8888", "node10:8889", "node2:8888", "node2:8889"]),
        # Ends of names are no ranges of millions of nodes.
        ("a1-20240613-[1-2]", "1(x2)", ["a1-20240613-1", "a1-20240613-2"], ["a1-20240613-1:8888", "a1-20240613-2:8888"]),
        (
            *("node[2,10],big07", "1(x2),3", ["node2", "node10", *["big07"] * 3]),
            ["big07:8888", "big07:8889", "big07:8890", "node10:8888", "node2:8888"],
        ),
        # The GPUs stay as they are, and may be fewer than the tasks.
        ("node1", "4", ["node1"] * 4, [f"node1:{port}" for port in range(8888, 8892)]),
    ],
)
def test_slurm(node_list, tasks_per_node, tasks, addresses, step, monkeypatch):
    """Each task finds all addresses, and its own place among them."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    places = []
    for rank, node in enumerate(tasks):
        step(node_list, tasks_per_node, tasks, rank)
        cluster = find_cluster()
        assert (cluster.jobs, cluster.job) == ({"worker": addresses}, "worker")
        assert cluster.addresses[cluster.index] == f"{node}:{SLURM_PORT + tasks[:rank].count(node)}"
        places.append(cluster.index)
    assert sorted(places) == list(range(len(tasks)))
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "3"


def test_a_process_alone(step, monkeypatch):
    """The script that sbatch runs has variables of the job, and none of a step."""
    assert find_cluster() is None
    for name, value in (("SLURM_NTASKS", "2"), ("SLURM_JOB_NODELIST", "node[2,10]"), ("SLURM_PROCID", "0")):
        monkeypatch.setenv(name, value)
    assert find_cluster() is None
    step("node2", "1", ["node2"])
    assert find_cluster() is None


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("SLURM_PROCID", None, "SLURM_PROCID not found in environment"),
        ("SLURMD_NODENAME", None, "'SLURMD_NODENAME' is missing."),
        ("SLURMD_NODENAME", "node3", "'node3:8888' is not in list."),
        ("SLURM_LOCALID", "first", "invalid literal for int() with base 10: 'first'."),
        ("SLURM_STEP_NUM_TASKS", "3", "Requested 3 tasks but only 2 were assigned."),
        ("SLURM_STEP_TASKS_PER_NODE", "2(x2", 'Invalid tasks-per-node list format "2(x2"'),
        ("SLURM_STEP_NODELIST", "rack[1-2]node[1-2]", 'Invalid hostlist format "rack[1-2]node[1-2]"'),
    ],
)
def test_slurm_variables_that_do_not_fit_together(step, monkeypatch, name, value, reason):
    step(*OF_TWO)
    monkeypatch.delenv(name) if value is None else monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=f"^Slurm's variables do not describe this step: {re.escape(reason)}") as error:
        find_cluster()
    message = str(error.value)
    assert "Start the workers with srun, one task for each, or set TF_CONFIG. Received: {'SLURM" in message
    assert all(f"{name!r}: {value!r}" in message for name, value in os.environ.items() if name.startswith("SLURM"))


def test_tf_config_goes_before_slurm(step, find):
    step(*OF_TWO)
    assert find(config({"worker": TWO}, index=1)).addresses == TWO
    assert find("{}") is None
    assert find(" ").addresses == ["node10:8888", "node2:8888"]
