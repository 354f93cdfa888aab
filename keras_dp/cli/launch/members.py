"""Decide which workers start again after one has failed."""


class Members:
    """Knows the places of the workers that run, such as their shares of the GPUs.

    A worker that fails in two starts in a row is left out. When all others start again for another reason, it is tried again,
    and left out at its first failure. So a worker that was gone for a while comes back, as in torchrun's elastic groups
    (https://docs.pytorch.org/docs/stable/elastic/run.html).

    Attributes:
        places: the places of the workers that run, in the order of their numbers.

    Args:
        count: the number of workers, whose places are 0 to `count` - 1.
        least: the number of workers below which none is left out.
    """

    def __init__(self, count: int, least: int):
        self.places = list(range(count))
        self._least = least
        self._left_out: set[int] = set()
        self._tried_again: set[int] = set()
        self._failed_before: int | None = None

    def start_again(self, culprit: int) -> str:
        """Chooses the places of the next start, and tells the user.

        Args:
            culprit: the number of the worker whose failure ended the others.
        """
        place = self.places[culprit]
        is_tried_again, is_again = place in self._tried_again, place == self._failed_before
        if (is_tried_again or is_again) and len(self.places) > self._least:
            self.places.remove(place)
            self._left_out.add(place)
            self._tried_again.discard(place)
            reason = "has failed again" if is_tried_again else "has failed twice in a row"
            return f"worker {culprit} {reason} and is left out, {_workers_start(len(self.places))} again"
        self._failed_before = place
        if not self._left_out:
            return "all workers start again"
        returning = len(self._left_out)
        self.places = sorted([*self.places, *self._left_out])
        self._tried_again |= self._left_out
        self._left_out.clear()
        return f"all workers start again, with {'one' if returning == 1 else returning} that had been left out"


def _workers_start(count: int) -> str:
    return "1 worker starts" if count == 1 else f"{count} workers start"
