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
        behind: the names of what it does not occupy, but waits for: until all is done there that was given before it.
        queue: the name of the queue that it is given to; empty if there is none. A task is given to its resources when those
            that it waits for are done. In a queue, as of a GPU, it is given as soon as those of the same queue are given, and
            starts later.
        giving_seconds: how much later the next task is given to the queue.
        ending_seconds: how long after it has left what it occupies its end is seen, as of a copy.
    """

    seconds: float
    resources: tuple[str, ...]
    after: tuple[int, ...]
    behind: tuple[str, ...] = ()
    queue: str = ""
    giving_seconds: float = 0.0
    ending_seconds: float = 0.0


class Span(NamedTuple):
    """The times at which a task starts and finishes, in seconds."""

    start: float
    finish: float


def schedule(tasks: Sequence[Task]) -> list[Span]:
    """Returns when each task runs. Each resource takes tasks in the order in which they are given to it.

    Tasks that are given at the same time are taken in their own order.

    Raises:
        ValueError: if tasks wait for each other.
    """
    followers = defaultdict(list)
    for i, task in enumerate(tasks):
        for before in task.after:
            followers[before].append(i)
    missing = [len(task.after) for task in tasks]
    given_at, ready_at = [0.0] * len(tasks), [0.0] * len(tasks)
    free_at: dict[str, float] = defaultdict(float)
    spans: dict[int, Span] = {}
    given = [(0.0, i) for i, count in enumerate(missing) if not count]
    while given:
        now, i = heapq.heappop(given)
        task = tasks[i]
        start = max([now, ready_at[i], *(free_at[resource] for resource in (*task.resources, *task.behind))])
        free_at.update(dict.fromkeys(task.resources, start + task.seconds))
        spans[i] = Span(start, start + task.seconds + task.ending_seconds)
        for follower in followers[i]:
            is_queued = task.queue and tasks[follower].queue == task.queue
            known = now + task.giving_seconds if is_queued else spans[i].finish
            given_at[follower] = max(given_at[follower], known)
            ready_at[follower] = max(ready_at[follower], spans[i].finish)
            missing[follower] -= 1
            if not missing[follower]:
                heapq.heappush(given, (given_at[follower], follower))
    if len(spans) < len(tasks):
        stuck = [i for i in range(len(tasks)) if i not in spans]
        raise ValueError(
            f"Tasks must not wait for each other. Received: {len(stuck)} tasks that do, such as {tasks[stuck[0]]!r}"
        )
    return [spans[i] for i in range(len(tasks))]
