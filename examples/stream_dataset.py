"""Rows of a stream as a PyTorch dataset, the most urgent first: `StreamDataset` and `Priority`."""

import asyncio
import tempfile
from pathlib import Path

import torch
from torch.utils.data import DataLoader

from flowrt import api

ROWS, JOIN_S = 64, 30.0
READ = api.Stage("read", needs=("pixels", "urgency"), makes=())
FLOW = api.Dataflow((api.Column("pixels", "float32", "group"),), (READ,), tags=("urgency",))
# A row that waits gains 0.01 of urgency with each row that is offered after it, so that none waits forever.
FIRST = api.Priority(lambda slot: slot.inline["urgency"], ageing=0.01)
POLICIES = api.Policies(api.StrictLag(0), FIRST, api.GroupCount(1), api.DelayedUpdate())


def read(address: str) -> list[float]:
    """What a training loop does: it iterates over the stream, here without processes of the DataLoader."""
    rows = DataLoader(api.StreamDataset(address, "read", slots=8), batch_size=None)
    return [float(row["urgency"]) for row in rows if torch.as_tensor(row["pixels"]).shape == (28 * 28,)]


async def main() -> None:
    with tempfile.TemporaryDirectory() as run_dir:
        async with api.controller(FLOW, api.Settings(), POLICIES, Path(run_dir)) as (_, address):
            source = await api.connect(address, "source", "source", JOIN_S)
            urgency = [float(row % 3) for row in range(ROWS)]
            await source.offer_many(
                "rows", range(ROWS), 0, 1, {"pixels": [torch.zeros(28 * 28)] * ROWS}, {"urgency": urgency}
            )
            source.exhausted("rows")
            order = await asyncio.to_thread(read, address)
            await source.close()
    print(f"{len(order)} rows, the most urgent first: {order == sorted(urgency, reverse=True)}")


if __name__ == "__main__":
    api.run_loop(main())
