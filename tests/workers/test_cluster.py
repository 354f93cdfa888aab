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


def test_nothing_said():
    assert find_cluster() is None


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


@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize("kind", [int, str])
def test_workers(find, index, kind):
    cluster = find(config({"worker": TWO}, index=kind(index)))
    assert cluster == Cluster({"worker": TWO}, "worker", index)
    assert cluster.addresses == TWO
    assert cluster.index == index
    assert cluster.names == ["/job:worker/replica:0/task:0", "/job:worker/replica:0/task:1"]


@pytest.mark.parametrize(("kind", "task", "index"), [("chief", 0, 0), ("worker", 0, 1), ("worker", 1, 2)])
def test_chief_is_the_first(find, kind, task, index):
    # Kubernetes' training operator writes it so.
    cluster = find(config({"worker": TWO, "chief": ["gamma:2222"]}, kind, task, environment="cloud"))
    assert cluster.index == index
    assert cluster.addresses == ["gamma:2222", *TWO]
    names = ["/job:chief/replica:0/task:0", "/job:worker/replica:0/task:0", "/job:worker/replica:0/task:1"]
    assert cluster.names == names


@pytest.mark.parametrize(
    "addresses",
    [
        ["127.0.0.1:1", "127.0.0.1:65535"],
        ["[::1]:2222", "[2001:db8::2]:2222"],
        ["train-worker-0.default.svc:2222", "train-worker-1.default.svc:2222"],
    ],
)
def test_addresses(find, addresses):
    assert find(config({"worker": addresses}, index=1)).addresses == addresses


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
        ("{'cluster': {}}", "TF_CONFIG is not JSON: Expecting property name enclosed in double quotes"),
        ("[]", "TF_CONFIG is not a JSON object."),
        ('"worker"', "TF_CONFIG is not a JSON object."),
        (config(TWO), NOT_A_MAP),
        (config("alpha:2222,beta:2222"), NOT_A_MAP),
        (config({"worker": "alpha:2222"}), NOT_A_MAP),
        (config({"worker": {"0": "alpha:2222"}}), NOT_A_MAP),
        (config({"worker": ["alpha:2222", 2222]}), NOT_A_MAP),
        (config({"ps": ["gamma:2222"], "worker": TWO}), unknown_jobs("ps")),
        (config({"ps": ["gamma:2222"], "evaluator": ["delta:2222"], "worker": TWO}), unknown_jobs("evaluator, ps")),
        (config({"master": ["alpha:2222"], "worker": ["beta:2222"]}, "master"), unknown_jobs("master")),
        (SPARSE, '"sparseCluster" does not name all workers: leave enableDynamicWorker out of the TFJob.'),
        (config({"worker": ["alpha:2222", "alpha:2222"]}), TWICE),
        (config({"chief": ["alpha:2222"], "worker": TWO}), TWICE),
        (config({"chief": TWO, "worker": ["gamma:2222"]}), TWICE),
        (config({"worker": ["alpha", "beta:2222"]}), not_an_address("alpha")),
        (config({"worker": ["alpha:2222", "beta:"]}), not_an_address("beta:")),
        (config({"worker": ["alpha:2222", ":2222"]}), not_an_address(":2222")),
        (config({"worker": ["alpha:2222", "beta:http"]}), not_an_address("beta:http")),
        (config({"worker": ["alpha:2222", "beta:0"]}), not_an_address("beta:0")),
        (config({"worker": ["alpha:2222", "beta:65536"]}), not_an_address("beta:65536")),
        (config({"worker": ["alpha:2222", "beta:-1"]}), not_an_address("beta:-1")),
        (config({"worker": ["alpha:2222", " beta:2222"]}), not_an_address(" beta:2222")),
        (config({"worker": ["alpha:2222", "grpc://beta:2222"]}), not_an_address("grpc://beta:2222")),
        (config({"worker": ["[::1]:2222", "::1:2223"]}), not_an_address("::1:2223")),
        (config({"worker": ["[::1]:2222", "[::1]"]}), not_an_address("[::1]")),
        (config({"worker": TWO}, index=2), NOT_ONE_OF_TWO),
        (config({"worker": TWO}, index=-1), NOT_ONE_OF_TWO),
        (config({"worker": TWO}, index="-1"), NOT_ONE_OF_TWO),
        (config({"worker": TWO}, index=True), NOT_ONE_OF_TWO),
        (config({"worker": TWO}, index=1.0), NOT_ONE_OF_TWO),
        (config({"worker": TWO}, index=None), NOT_ONE_OF_TWO),
        (config({"worker": TWO}, index="first"), NOT_ONE_OF_TWO),
        (config({"worker": TWO}, kind="evaluator"), NOT_ONE_OF_TWO),
        (config({"worker": TWO}, kind="chief"), NOT_ONE_OF_TWO),
        (config({"worker": TWO}, kind=None), NOT_ONE_OF_TWO),
        (config({"chief": ["gamma:2222"], "worker": ["beta:2222"]}, index=1), NOT_ONE_OF_TWO),
        ({"cluster": {"worker": TWO}}, NOT_ONE_OF_TWO),
        ({"cluster": {"worker": TWO}, "task": {}}, NOT_ONE_OF_TWO),
        ({"cluster": {"worker": TWO}, "task": {"type": "worker"}}, NOT_ONE_OF_TWO),
        ({"cluster": {"worker": TWO}, "task": {"index": 0}}, NOT_ONE_OF_TWO),
        ({"cluster": {"worker": TWO}, "task": 0}, NOT_ONE_OF_TWO),
        ({"cluster": {"worker": ["alpha:2222"]}}, '"task" is not one of the 1 of "cluster".'),
    ],
)
def test_malformed(find, value, reason):
    with pytest.raises(ValueError, match=f"^{re.escape(reason)}") as error:
        find(value)
    received = value if isinstance(value, str) else json.dumps(value)
    assert str(error.value).endswith(f" {EXPECTED} Received: TF_CONFIG={received}")


class Step:
    """Sets the variables of Slurm for each task of a job step, in Slurm's order.

    Args:
        node_list: the list of nodes, as Slurm writes it.
        tasks_per_node: the numbers of tasks, as Slurm writes them.
        tasks: the node of each task.
    """

    def __init__(self, monkeypatch, node_list, tasks_per_node, tasks):
        self.monkeypatch = monkeypatch
        self.tasks = [(node, tasks[:rank].count(node)) for rank, node in enumerate(tasks)]
        self.shared = {
            "SLURM_STEP_NUM_TASKS": str(len(tasks)),
            "SLURM_STEP_NODELIST": node_list,
            "SLURM_STEP_TASKS_PER_NODE": tasks_per_node,
        }

    def set_variables(self, rank=0):
        node, local = self.tasks[rank]
        own = {"SLURM_PROCID": str(rank), "SLURMD_NODENAME": node, "SLURM_LOCALID": str(local)}
        for name, value in (self.shared | own).items():
            self.monkeypatch.setenv(name, value)

    def find(self, rank):
        self.set_variables(rank)
        return find_cluster()

    def check(self, addresses):
        """Asserts that each task finds all addresses, and its own place among them."""
        found = [self.find(rank) for rank in range(len(self.tasks))]
        assert all(cluster.jobs == {"worker": addresses} and cluster.job == "worker" for cluster in found)
        assert sorted(cluster.index for cluster in found) == list(range(len(self.tasks)))
        for cluster, (node, local) in zip(found, self.tasks, strict=True):
            assert cluster.addresses[cluster.index] == f"{node}:{SLURM_PORT + local}"


@pytest.fixture
def step(monkeypatch):
    def make(*arguments):
        return Step(monkeypatch, *arguments)

    return make


def test_slurm_one_task_on_each_node(step):
    step("node[1-3]", "1(x3)", ["node1", "node2", "node3"]).check(["node1:8888", "node2:8888", "node3:8888"])


def test_slurm_several_tasks_on_each_node(step):
    tasks = step("node[2,10]", "2(x2)", ["node2", "node2", "node10", "node10"])
    tasks.check(["node10:8888", "node10:8889", "node2:8888", "node2:8889"])


def test_slurm_order_is_not_that_of_the_alphabet(step):
    # node10 comes before node2 in alphabetical order, and after it in Slurm's order.
    step("node[2,10]", "1(x2)", ["node2", "node10"]).check(["node10:8888", "node2:8888"])


def test_slurm_tasks_dealt_out_in_turn(step):
    # srun --distribution=cyclic
    tasks = step("node[2,10]", "2(x2)", ["node2", "node10", "node2", "node10"])
    tasks.check(["node10:8888", "node10:8889", "node2:8888", "node2:8889"])


@pytest.mark.parametrize("nodes", [("a1-20240613-1", "a1-20240613-2"), ("c1-100000", "c1-100001")])
def test_slurm_numbers_in_the_names_of_nodes(step, nodes):
    """Such names were taken for ranges of millions of nodes."""
    shortened = "a1-20240613-[1-2]" if nodes[0].startswith("a") else ",".join(nodes)
    step(shortened, "1(x2)", list(nodes)).check([f"{node}:8888" for node in nodes])


def test_slurm_nodes_with_different_numbers_of_tasks(step):
    tasks = step("node[2,10],big07", "1(x2),3", ["node2", "node10", "big07", "big07", "big07"])
    tasks.check(["big07:8888", "big07:8889", "big07:8890", "node10:8888", "node2:8888"])


def test_slurm_more_tasks_than_gpus(step, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    step("node1", "4", ["node1"] * 4).check([f"node1:{port}" for port in range(8888, 8892)])
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "3"


def test_slurm_one_task(step):
    assert step("node2", "1", ["node2"]).find(0) is None


def test_slurm_without_a_step(monkeypatch):
    # The script that sbatch runs has these variables.
    monkeypatch.setenv("SLURM_NTASKS", "2")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "node[2,10]")
    monkeypatch.setenv("SLURM_PROCID", "0")
    assert find_cluster() is None


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("SLURM_PROCID", "SLURM_PROCID not found in environment"),
        ("SLURM_STEP_NODELIST", "SLURM_STEP_NODELIST not found in environment"),
        ("SLURM_STEP_TASKS_PER_NODE", "SLURM_STEP_TASKS_PER_NODE not found in environment"),
        ("SLURMD_NODENAME", "'SLURMD_NODENAME' is missing."),
        ("SLURM_LOCALID", "'SLURM_LOCALID' is missing."),
    ],
)
def test_slurm_variable_missing(step, monkeypatch, name, reason):
    step("node[2,10]", "1(x2)", ["node2", "node10"]).set_variables()
    monkeypatch.delenv(name)
    refused_for(reason)


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("SLURMD_NODENAME", "node3", "'node3:8888' is not in list."),
        ("SLURM_LOCALID", "1", "'node2:8889' is not in list."),
        ("SLURM_LOCALID", "first", "invalid literal for int() with base 10: 'first'."),
        ("SLURM_STEP_NUM_TASKS", "3", "Requested 3 tasks but only 2 were assigned."),
        ("SLURM_STEP_TASKS_PER_NODE", "2(x2", 'Invalid tasks-per-node list format "2(x2"'),
        ("SLURM_STEP_NODELIST", "rack[1-2]node[1-2]", 'Invalid hostlist format "rack[1-2]node[1-2]"'),
    ],
)
def test_slurm_variables_that_do_not_fit_together(step, monkeypatch, name, value, reason):
    step("node[2,10]", "1(x2)", ["node2", "node10"]).set_variables()
    monkeypatch.setenv(name, value)
    refused_for(reason)


def refused_for(reason):
    with pytest.raises(ValueError, match=f"^Slurm's variables do not describe this step: {re.escape(reason)}") as error:
        find_cluster()
    message = str(error.value)
    assert "Start the workers with srun, one task for each, or set TF_CONFIG. Received: {'SLURM" in message
    assert all(f"{name!r}: {value!r}" in message for name, value in os.environ.items() if name.startswith("SLURM"))


def test_tf_config_goes_before_slurm(step, find):
    step("node[2,10]", "1(x2)", ["node2", "node10"]).set_variables()
    assert find(config({"worker": TWO}, index=1)).addresses == TWO
    assert find("{}") is None
    assert find(" ").addresses == ["node10:8888", "node2:8888"]
