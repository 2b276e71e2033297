"""Where a flow of prompts is: which of them have been opened before, by this source or by one that it replaces."""

from bisect import bisect_right

from flowrt.wire.messages import Position


class Place:
    """A set of (epoch, prompt) pairs, as compact as the controller tells it."""

    def __init__(self, told: Position) -> None:
        self._begins = list(zip(told.epochs, told.starts, strict=True))
        self._counts = told.counts

    def __contains__(self, pair: object) -> bool:
        assert isinstance(pair, tuple)
        run = bisect_right(self._begins, pair) - 1
        if run < 0:
            return False
        epoch, start = self._begins[run]
        return bool(pair[0] == epoch and pair[1] < start + self._counts[run])

    def __len__(self) -> int:
        return sum(self._counts)
