"""A producer or consumer of TransferQueue with the commands of `ends.py`; runs with a Python that has it.

``put`` is its `put`, ``get`` is its `get_meta` and `get_data`; every row is checked.
"""

import os
import time
from typing import Any

from common.children import serve_commands
from common.peer_queue import connect

FIELD = "x"


class Client:
    def __init__(self) -> None:
        import torch
        from tensordict import TensorDict

        self._torch, self._dict = torch, TensorDict
        self._client: Any = None

    def join(self, address: str) -> None:
        self._client = connect(address)

    def make(self, sizes: list[int], first: int) -> None:
        """Make rows of one field: dense if all sizes are equal, else jagged; each begins with its id (int64)."""
        torch = self._torch
        ids = torch.arange(first, first + len(sizes)).view(torch.uint8).view(-1, 8)
        if len(set(sizes)) == 1:
            field = torch.ones(len(sizes), sizes[0], dtype=torch.uint8)
            field[:, :8] = ids
        else:
            rows = [torch.ones(size, dtype=torch.uint8) for size in sizes]
            for row, name in zip(rows, ids, strict=True):
                row[:8] = name
            field = torch.nested.as_nested_tensor(rows, layout=torch.jagged)
        self._payload, self._count = self._dict({FIELD: field}, batch_size=[len(sizes)]), len(sizes)

    def put(self, part: str) -> float:
        begin_s = time.perf_counter()
        self._client.put(self._payload, partition_id=part)
        return time.perf_counter() - begin_s

    def get(self, part: str, count: int, first: int) -> float:
        begin_s = time.perf_counter()
        meta = self._client.get_meta([FIELD], count, part, task_name="read")
        rows = self._client.get_data(meta)[FIELD]
        taken_s = time.perf_counter() - begin_s
        rows = rows.unbind() if rows.is_nested else list(rows)
        ids = sorted(int(row[:8].clone().view(self._torch.int64)[0]) for row in rows)
        if ids != list(range(first, first + count)):
            raise ValueError("the rows that came out are not those that were put")
        return taken_s

    def clear(self, part: str) -> None:
        self._client.clear_partition(part)


if __name__ == "__main__":
    client = Client()
    serve_commands({order: getattr(client, order) for order in ("join", "make", "put", "get", "clear")})
    os._exit(0)  # the client's threads do not end
