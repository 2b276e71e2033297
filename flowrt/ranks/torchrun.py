"""Start of a trainer's ranks on one host under torchrun, with a rendezvous that never unpickles data from other users.

Usage: ``python -m flowrt.ranks.torchrun --ranks N [--hosts M --rendezvous HOST:PORT] [--directory DIR] TRAINER_ARGS``.

By default torchrun opens an unauthenticated store on all interfaces, with pickled contents. On one host two files
replace it, one for torchrun and one for its ranks (`process_group`), in a private temporary directory below DIR. The
directory is removed when torchrun ends; if torchrun is killed, the launcher removes DIR. Several hosts use
`flowrt.ranks.rendezvous` with the launcher's store.
"""

import argparse
import os
import sys
import tempfile
from pathlib import Path

from torch.distributed.run import main as torchrun

from flowrt.ranks.process_group import STORE_VARIABLE
from flowrt.ranks.rendezvous import COUNTING, register
from flowrt.runtime.files import private_directory
from flowrt.runtime.interpreter import RUN_MODULE
from flowrt.runtime.termination import TORCHRUN_SIGNALS, TORCHRUN_VARIABLES

DIES_WITH_PARENT = "flowrt.runtime.parent_death"
TRAINER_MODULE = "flowrt.roles.trainer"
RENDEZVOUS_TIMEOUT_S = 600.0


def main() -> None:
    parser = argparse.ArgumentParser(description="the ranks of a trainer on one host, under torchrun", add_help=False)
    parser.add_argument("--ranks", type=int, required=True, help="number of ranks on this host")
    parser.add_argument("--hosts", type=int, default=1, help="number of hosts, each with this many ranks")
    parser.add_argument("--rendezvous", default="", help="HOST:PORT of flowrt.ranks.rendezvous")
    parser.add_argument("--directory", default="", help="parent of the temporary directory (default: the system's)")
    own, theirs = parser.parse_known_args()
    for variable in TORCHRUN_VARIABLES:
        os.environ.setdefault(variable, TORCHRUN_SIGNALS)
    if own.directory:
        private_directory(Path(own.directory))
    with tempfile.TemporaryDirectory(prefix="flowrt-ranks-", dir=own.directory or None) as directory:
        # Without --log-dir torchrun leaves a directory behind in the system's temporary directory.
        log_dir = ["--log-dir", directory]
        rank = [sys.executable, "-u", RUN_MODULE, DIES_WITH_PARENT, TRAINER_MODULE, *theirs]
        trainers = [*log_dir, "--nproc-per-node", str(own.ranks), "--no-python", *rank]
        if own.hosts > 1:
            register(RENDEZVOUS_TIMEOUT_S)
            rendezvous = ["--rdzv-backend", COUNTING, "--rdzv-endpoint", own.rendezvous, "--rdzv-id", "trainer"]
            torchrun(["--nnodes", str(own.hosts), *rendezvous, *trainers])
            return
        # Otherwise torchrun would open a store for its ranks.
        os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        os.environ[STORE_VARIABLE] = str(Path(directory, "ranks"))
        rendezvous = [
            "--rdzv-backend",
            "c10d",
            "--rdzv-conf",
            "store_type=file",
            "--rdzv-endpoint",
            f"{directory}/agent",
        ]
        torchrun([*rendezvous, *trainers])


if __name__ == "__main__":
    main()
