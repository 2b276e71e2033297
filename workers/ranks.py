"""The ranks of a trainer on one host, started by torchrun so that no stranger can give them anything to unpickle.

``python -m flowrt.workers.ranks --ranks N [--hosts M --meeting HOST:PORT] ARGUMENTS OF THE TRAINER``. Left to itself
torchrun opens a store that listens on all interfaces, asks for no key and holds pickles. On one host two files do it:
one for torchrun, one for its ranks (`flowrt.workers.group`), in a directory that only this user can open and that is
gone when it is. On several, they meet by what `flowrt.workers.agents` puts in a store of the launcher's.
"""

import argparse
import os
import tempfile
from pathlib import Path

from flowrt.workers.agents import COUNTED, register
from flowrt.workers.group import STORE_VARIABLE
from torch.distributed.run import main as torchrun

RANK = "flowrt.workers.rank"
TRAINER = "flowrt.workers.trainer"
MEET_S = 600.0


def main() -> None:
    parser = argparse.ArgumentParser(description="the ranks of a trainer on one host, under torchrun", add_help=False)
    parser.add_argument("--ranks", type=int, required=True, help="how many on this host")
    parser.add_argument("--hosts", type=int, default=1, help="how many hosts have so many")
    parser.add_argument("--meeting", default="", help="HOST:PORT where the hosts meet (flowrt.workers.meeting)")
    own, theirs = parser.parse_known_args()
    trainers = ["--nproc-per-node", str(own.ranks), "-m", RANK, TRAINER, *theirs]
    if own.hosts > 1:
        register(MEET_S)
        meeting = ["--rdzv-backend", COUNTED, "--rdzv-endpoint", own.meeting, "--rdzv-id", "trainer"]
        torchrun(["--nnodes", str(own.hosts), *meeting, *trainers])
        return
    # torchrun would open a store for its ranks, too.
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    with tempfile.TemporaryDirectory(prefix="flowrt-ranks-") as directory:
        os.environ[STORE_VARIABLE] = str(Path(directory, "ranks"))
        meeting = ["--rdzv-backend", "c10d", "--rdzv-conf", "store_type=file", "--rdzv-endpoint", f"{directory}/agent"]
        torchrun([*meeting, *trainers])


if __name__ == "__main__":
    main()
