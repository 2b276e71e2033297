"""Two ranks that step together, until the second hangs: torchrun hanging_rank.py DEADLINE_S."""

import asyncio
import os
import sys
import threading

import torch
import torch.distributed as dist

from flowrt.errors import WaitExpired
from flowrt.ranks.barrier import RankCollectives
from flowrt.ranks.process_group import init_ranks
from flowrt.runtime.parent_death import die_with_parent
from flowrt.transport.devices import choose


async def main(deadline_s: float) -> int:
    init_ranks(choose("cpu", 0), deadline_s)
    ranks, number = RankCollectives(), torch.ones(1)
    for step in range(4):
        await ranks.call(lambda: dist.all_reduce(number), f"step {step}")
    if dist.get_rank() == 1:
        await asyncio.to_thread(threading.Event().wait)
    try:
        await ranks.call(lambda: dist.all_reduce(number), "step 4")
    except WaitExpired as expired:
        sys.stdout.write(f"{expired}\n")
    return 0


if __name__ == "__main__":
    die_with_parent()
    asyncio.run(main(float(sys.argv[1])))
    sys.stdout.flush()
    os._exit(1)  # makes torchrun end the other rank
