"""Where the ranks of a trainer wait for each other before they meet inside torch.distributed.

The deadline of torch.distributed knows no excuse: whoever is not in a collective in time has failed. So the ranks meet
here first. In the store of their group each leaves a mark when it has come, and signs of life while it is excused: at
something that takes as long as it takes, and is ended by a deadline of its own.
"""

import contextlib
from collections.abc import Iterator
from time import monotonic

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from flowrt.errors import WaitExpired
from flowrt.waiting import LOOKS, heard_from, passed, repeated

OTHERS = "the other ranks"


class RollCall:
    """Meetings to which all ranks come in one order; ``series`` tells them from others in the same group."""

    def __init__(self, series: str) -> None:
        self._ranks = dist.get_world_size() if dist.is_initialized() else 1
        self._store = _get_default_store() if self._ranks > 1 else dist.HashStore()
        self._rank = dist.get_rank() if self._ranks > 1 else 0
        self._seconds = self._store.timeout.total_seconds()  # type: ignore[attr-defined]  # not in torch's stubs
        self._series = f"flowrt/{series}"
        self._is_excused = False
        # Of an earlier roll call of this series, where there was one: the store still counts its meetings.
        self._meeting = self._count(f"{self._series}/{self._rank}")

    def here(self, what: str) -> None:
        """Come to the next meeting; returns when all have.

        Raises WaitExpired, which names them, when some have neither come nor given a sign of life within the timeout
        of the group.
        """
        if self._ranks == 1:
            return
        begin_s = monotonic()
        self._meeting += 1
        self._store.set(f"{self._series}/{self._rank}", str(self._meeting))
        self._store.add(self._series, 1)
        if missing := heard_from(self._all_came, self._signs_of_missing, self._seconds, what, OTHERS):
            who = ", ".join(map(str, missing))
            raise WaitExpired(
                f"rank {self._rank} waited {monotonic() - begin_s:.0f} s for {what} with {OTHERS}: rank {who} did not "
                "come"
            )

    @contextlib.contextmanager
    def excused(self) -> Iterator[None]:
        """For the length of a block the others wait for this rank as long as its process lives and runs."""
        if self._ranks == 1:
            yield
            return
        self._is_excused = True
        try:
            with repeated(self._sign, self._seconds / LOOKS, "signs of life"):
                yield
        finally:
            self._is_excused = False

    def silent(self) -> list[int]:
        """Ranks that give no sign of life now, where all do: this one is excused, and they were with it in a call."""
        if not self._is_excused:
            return []
        others = {rank for rank in range(self._ranks) if rank != self._rank}
        try:
            before = {rank: self._count(_signs(rank)) for rank in others}
            passed(2 * self._seconds / LOOKS)
            return sorted(rank for rank in others if self._count(_signs(rank)) == before[rank])
        except dist.DistError:
            return []  # the store has gone with whoever had it

    def _all_came(self) -> bool:
        # Nobody comes to a meeting before all have come to the one before it.
        return self._count(self._series) >= self._meeting * self._ranks

    def _signs_of_missing(self) -> dict[int, int]:
        """The ranks that have not come yet, each with the signs of life that it has ever given."""
        came = {rank: self._count(f"{self._series}/{rank}") for rank in range(self._ranks)}
        return {rank: self._count(_signs(rank)) for rank, meeting in came.items() if meeting < self._meeting}

    def _sign(self) -> None:
        with contextlib.suppress(dist.DistError):  # the store has gone with whoever had it, which ends those who wait
            self._store.add(_signs(self._rank), 1)

    def _count(self, key: str) -> int:
        """What was counted there; asked for unseen, the store would wait for it."""
        return int(self._store.get(key)) if self._store.check([key]) else 0


def _signs(rank: int) -> str:
    return f"flowrt/signs/{rank}"
