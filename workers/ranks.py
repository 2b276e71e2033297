"""The ranks of a trainer on one host, started by torchrun so that nobody else can take part in their meeting.

``python -m flowrt.workers.ranks --ranks N ARGUMENTS OF THE TRAINER``. Left to itself torchrun opens a store that
listens on all interfaces, asks for no key and holds pickles. On one host two files do instead: one for torchrun, one
for its ranks (`flowrt.workers.group`), in a directory that only this user can open and that is gone when it is.
"""

import argparse
import os
import tempfile
from pathlib import Path

from flowrt.workers.group import STORE_VARIABLE
from torch.distributed.run import main as torchrun

RANK = "flowrt.workers.rank"
TRAINER = "flowrt.workers.trainer"


def main() -> None:
    parser = argparse.ArgumentParser(description="the ranks of a trainer on one host, under torchrun", add_help=False)
    parser.add_argument("--ranks", type=int, required=True, help="how many")
    own, theirs = parser.parse_known_args()
    # torchrun would open a store for its ranks, too.
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    with tempfile.TemporaryDirectory(prefix="flowrt-ranks-") as directory:
        os.environ[STORE_VARIABLE] = str(Path(directory, "ranks"))
        meeting = ["--rdzv-backend", "c10d", "--rdzv-conf", "store_type=file", "--rdzv-endpoint", f"{directory}/agent"]
        torchrun(["--nproc-per-node", str(own.ranks), *meeting, "-m", RANK, TRAINER, *theirs])


if __name__ == "__main__":
    main()
