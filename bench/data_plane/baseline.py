"""TransferQueue with the same commands as `ends.py`; runs with a Python that has TransferQueue, without flowrt.

    python bench/data_plane/baseline.py queue             starts Ray, the queue's controller and its storage
    python bench/data_plane/baseline.py client ADDRESS    a producer or consumer in a process of its own

In its fastest configuration: two storage units (its default), polling, one torch thread. ``put`` is its `put`, ``get``
is its `get_meta` and `get_data`; every row is checked.
"""

import base64
import json
import os
import pickle
import sys
import time

os.environ.update(TQ_LOGGING_LEVEL="ERROR", TQ_NUM_THREADS="1", RAY_DEDUP_LOGS="0", RAY_USAGE_STATS_ENABLED="0")
os.environ.update(PYTHONWARNINGS="ignore")
UNITS, FIELD = 2, "x"


def reply(answer: object) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


def serve() -> None:
    """Run the queue until stdin ends."""
    import ray
    import transfer_queue
    from omegaconf import OmegaConf

    ray.init(
        num_cpus=UNITS + 4,
        include_dashboard=False,
        _node_ip_address="127.0.0.1",
        log_to_driver=False,
        object_store_memory=100 * 2**20,
        logging_level="ERROR",
    )
    storage = {"SimpleStorage": {"num_data_storage_units": UNITS}}
    wanted = {"controller": {"polling_mode": True}, "backend": storage}
    reached = transfer_queue.init(OmegaConf.create(wanted, flags={"allow_objects": True}))
    reply(base64.b64encode(pickle.dumps(reached)).decode())
    sys.stdin.read()
    transfer_queue.close()
    ray.shutdown()


class Client:
    def __init__(self, address: str) -> None:
        import torch
        from tensordict import TensorDict
        from transfer_queue import TransferQueueClient

        torch.set_num_threads(1)
        self._torch, self._dict = torch, TensorDict
        reached = pickle.loads(base64.b64decode(address))
        self._client = TransferQueueClient(f"client_{os.getpid()}", reached.controller.zmq_info)
        kind = reached.backend.storage_backend
        self._client.initialize_storage_manager(manager_type=kind, config=reached.backend[kind])

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
        found = sorted(int(row[:8].clone().view(self._torch.int64)[0]) for row in rows)
        if found != list(range(first, first + count)):
            raise ValueError("the rows that came out are not those that were put")
        return taken_s

    def clear(self, part: str) -> None:
        self._client.clear_partition(part)


if __name__ == "__main__":
    if sys.argv[1] == "queue":
        serve()
    else:
        client = Client(sys.argv[2])
        reply("ready")
        for line in sys.stdin:
            order, arguments = json.loads(line)
            reply(getattr(client, order)(*arguments))
        os._exit(0)  # the client's threads do not end
