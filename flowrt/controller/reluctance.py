"""Which of those that have a version shall serve it next."""

import heapq
from typing import NamedTuple

from flowrt.ids import WorkerId


class Reluctance(NamedTuple):
    """Who shall serve first: one that did not fail to before, that has least to send, and that is not the publisher.

    The publisher has better things to do, and its link is everybody's.
    """

    suspect: bool
    load: int
    publisher: bool
    worker: WorkerId


def least_reluctant(heap: list[Reluctance], receiver: WorkerId) -> WorkerId:
    """Take the first source; it has one more to serve then, and the receiver is a source too."""
    first = heap[0]
    heapq.heapreplace(heap, first._replace(load=first.load + 1))
    heapq.heappush(heap, Reluctance(False, 0, False, receiver))
    return first.worker
