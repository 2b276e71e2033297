"""TransferQueue for the benchmarks that are compared with it; runs with a Python that has it, without flowrt.

The file has another name than the package: the folder of a script comes first where Python looks for modules.

python bench/common/peer_queue.py     starts Ray, the queue's controller and its storage; prints how to reach them

In TransferQueue's fastest configuration: two storage units (its default), polling, one torch thread (several compete
for the cores of a small machine).
"""

import base64
import os
import pickle
import sys
from typing import Any

os.environ.update(TQ_LOGGING_LEVEL="ERROR", TQ_NUM_THREADS="1", RAY_DEDUP_LOGS="0", RAY_USAGE_STATS_ENABLED="0")
os.environ.update(PYTHONWARNINGS="ignore")

from common.children import Child, reply

UNITS = 2


def start_queue(python: str) -> Child:
    """A queue; its first answer has ``address`` and ``controller_pid``."""
    return Child("common/peer_queue.py", python=python)


def controller_pid() -> int | None:
    import psutil

    for process in psutil.process_iter(["pid", "cmdline"]):
        line = " ".join(process.info["cmdline"] or ())
        if line.startswith("ray::") and "TransferQueueController" in line:
            return int(process.info["pid"])
    return None


def serve() -> None:
    """Run the queue until stdin ends."""
    import ray
    import transfer_queue
    from omegaconf import OmegaConf

    quiet = {"include_dashboard": False, "log_to_driver": False, "logging_level": "ERROR"}
    ray.init(num_cpus=UNITS + 4, _node_ip_address="127.0.0.1", object_store_memory=100 * 2**20, **quiet)
    backend = {"SimpleStorage": {"num_data_storage_units": UNITS}}
    settings = OmegaConf.create(
        {"controller": {"polling_mode": True}, "backend": backend}, flags={"allow_objects": True}
    )
    reached = transfer_queue.init(settings)
    reply({"address": base64.b64encode(pickle.dumps(reached)).decode(), "controller_pid": controller_pid()})
    sys.stdin.read()
    transfer_queue.close()
    ray.shutdown()


def connect(address: str) -> Any:
    """A client of the queue."""
    import torch
    from transfer_queue import TransferQueueClient

    torch.set_num_threads(1)
    reached = pickle.loads(base64.b64decode(address))
    client = TransferQueueClient(f"client_{os.getpid()}", reached.controller.zmq_info)
    kind = reached.backend.storage_backend
    client.initialize_storage_manager(manager_type=kind, config=reached.backend[kind])
    return client


if __name__ == "__main__":
    serve()
