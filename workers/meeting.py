"""Where the torchruns of a trainer on several hosts find each other: a TCPStore on a port that the kernel chose.

``python -m flowrt.workers.meeting --host HOST --ready-fd FD`` writes HOST:PORT to the descriptor and stays until it is
ended. Whoever reaches the port can take part in the rendezvous, as with any torchrun on several hosts.
"""

import argparse
import os
import signal
import sys

from torch.distributed import TCPStore

from flowrt.errors import EXIT_INTERRUPTED


def main() -> int:
    parser = argparse.ArgumentParser(description="the rendezvous of torchruns on several hosts")
    parser.add_argument("--host", required=True, help="address of this host, as the others know it")
    parser.add_argument("--ready-fd", type=int, required=True, help="file descriptor to write HOST:PORT to")
    arguments = parser.parse_args()
    store = TCPStore(arguments.host, 0, is_master=True, wait_for_workers=False)
    os.write(arguments.ready_fd, f"{arguments.host}:{store.port}\n".encode())
    os.close(arguments.ready_fd)
    signal.sigwait({signal.SIGINT, signal.SIGTERM})
    return EXIT_INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
