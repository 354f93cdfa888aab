"""Schedule tasks on resources: each starts when what it waits for is done and its resources are free."""

import dataclasses
import heapq
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple


@dataclasses.dataclass(frozen=True)
class Task:
    """Something that takes time.

    Attributes:
        seconds: its duration.
        resources: the names of what it occupies meanwhile.
        after: the indices of the tasks that it waits for.
    """

    seconds: float
    resources: tuple[str, ...]
    after: tuple[int, ...]


class Span(NamedTuple):
    """The times at which a task starts and finishes, in seconds."""

    start: float
    finish: float


def schedule(tasks: Sequence[Task]) -> list[Span]:
    """Returns when each task runs. Each resource takes tasks in the order in which they are ready.

    Tasks that are ready at the same time are taken in their own order.

    Raises:
        ValueError: if tasks wait for each other.
    """
    followers = defaultdict(list)
    for i, task in enumerate(tasks):
        for before in task.after:
            followers[before].append(i)
    missing = [len(task.after) for task in tasks]
    ready_at = [0.0] * len(tasks)
    free_at: dict[str, float] = defaultdict(float)
    spans: dict[int, Span] = {}
    ready = [(0.0, i) for i, count in enumerate(missing) if not count]
    while ready:
        start, i = heapq.heappop(ready)
        task = tasks[i]
        start = max([start, *(free_at[resource] for resource in task.resources)])
        spans[i] = Span(start, start + task.seconds)
        free_at.update(dict.fromkeys(task.resources, spans[i].finish))
        for follower in followers[i]:
            ready_at[follower] = max(ready_at[follower], spans[i].finish)
            missing[follower] -= 1
            if not missing[follower]:
                heapq.heappush(ready, (ready_at[follower], follower))
    if len(spans) < len(tasks):
        stuck = [i for i in range(len(tasks)) if i not in spans]
        raise ValueError(
            f"Tasks must not wait for each other. Received: {len(stuck)} tasks that do, such as {tasks[stuck[0]]!r}"
        )
    return [spans[i] for i in range(len(tasks))]
