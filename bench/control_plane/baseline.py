"""A producer or consumer of TransferQueue with the commands of `streamers.py`; runs with a Python that has it.

A row is one field of one int64; every row is checked.
"""

import itertools
import os
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from common.children import serve_commands
from common.peer_queue import connect

FIELD, TASK = "value", "consume"
IDLE_S = 0.001


class Client:
    """The commands of `streamers.py` on TransferQueue: put is `put`, get is `get_meta` and `get_data`."""

    def __init__(self) -> None:
        import torch
        from tensordict import TensorDict

        self._torch, self._dict = torch, TensorDict
        self._client: Any = None
        self._pool: ThreadPoolExecutor | None = None

    def join(self, address: str) -> None:
        self._client = connect(address)

    def _threads(self, count: int) -> ThreadPoolExecutor:
        self._pool = self._pool or ThreadPoolExecutor(count)
        return self._pool

    def _rows(self, first: int, rows: int) -> Any:
        values = self._torch.arange(first, first + rows, dtype=self._torch.int64)
        return self._dict({FIELD: values.view(rows, 1)}, batch_size=[rows])

    def put(
        self,
        part: str,
        rows: int,
        requests: int,
        depth: int = 1,
        at_s: float = 0.0,
        last: bool = False,  # noqa: ARG002
    ) -> float:
        """Put rows with ``depth`` requests in flight, each in a thread because calls block; returns the seconds."""
        batches = [self._rows(first, rows) for first in range(0, rows * requests, rows)]
        time.sleep(max(0.0, at_s - time.monotonic()))
        start_s = time.monotonic()
        if depth == 1:
            for batch in batches:
                self._client.put(batch, partition_id=part)
        else:
            list(self._threads(depth).map(lambda batch: self._client.put(batch, partition_id=part), batches))
        return time.monotonic() - start_s

    def get(self, part: str, rows: int, requests: int, depth: int = 1) -> float:
        def request(_: int) -> Any:
            meta = self._client.get_meta([FIELD], rows, part, task_name=TASK)
            return self._client.get_data(meta)[FIELD]

        start_s = time.monotonic()
        got = list(map(request, range(requests)) if depth == 1 else self._threads(depth).map(request, range(requests)))
        seconds = time.monotonic() - start_s
        one_by_one = itertools.chain(*(batch.unbind() if batch.is_nested else list(batch) for batch in got))
        if sorted(int(row.contiguous()[0]) for row in one_by_one) != list(range(rows * requests)):
            raise ValueError(f"the {rows * requests} rows that were put are not the rows that came out")
        return seconds

    def drain(self, part: str, rows: int, total: int) -> dict[str, float]:
        """Get rows, with other consumers, until the task has consumed the ``total`` rows of the partition."""
        count, empty, last_s = 0, 0, time.monotonic()
        while True:
            meta = self._client.get_meta([FIELD], rows, part, task_name=TASK)
            if meta.size:
                count += len(self._client.get_data(meta))
                last_s = time.monotonic()
                continue
            empty += 1
            if empty % 20 == 0:
                _, consumed = self._client.get_consumption_status(TASK, part)
                if consumed is not None and consumed.numel() >= total and int(consumed.sum()) >= total:
                    return {"rows": count, "last_s": last_s}
            time.sleep(IDLE_S)

    def fill(self, part: str, rows: int, queue: int = -1) -> None:  # noqa: ARG002
        for first in range(0, rows, 1000):
            self._client.put(self._rows(first, min(1000, rows - first)), partition_id=part)

    def pull_times(self, parts: list[str], rows: int, count: int, warm: int) -> list[list[float]]:
        """Seconds of each `get_meta`, from the parts by turns: the controller's work alone, without the data."""
        times: list[list[float]] = [[] for _ in parts]
        for wanted in [1] * warm + [rows] * count:
            for part, seconds in zip(parts, times, strict=True):
                start_s = time.monotonic()
                meta = self._client.get_meta([FIELD], wanted, part, task_name=TASK)
                seconds.append(time.monotonic() - start_s)
                assert meta.size == wanted
        return [seconds[warm:] for seconds in times]

    def clear(self, part: str, rows: int, queue: int = -1) -> None:  # noqa: ARG002
        self._client.clear_partition(part)

    def first_row(self, address: str) -> float:
        """Join the queue, put a row and get it; returns when it came (monotonic seconds)."""
        self.join(address)
        self.put("first", 1, 1)
        self.get("first", 1, 1)
        return time.monotonic()


if __name__ == "__main__":
    client = Client()
    orders = ("join", "put", "get", "drain", "fill", "pull_times", "clear", "first_row")
    serve_commands({order: getattr(client, order) for order in orders}, os.getpid())
    os._exit(0)  # the client's threads do not end
