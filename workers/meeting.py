"""Where the torchruns of a trainer on several hosts find each other: a TCPStore on a port that the kernel chose.

``python -m flowrt.workers.meeting --host HOST --ready-fd FD`` writes HOST:PORT to the descriptor and stays until it is
ended. Whoever reaches the port can disturb the rendezvous; nothing in it is ever unpickled (`flowrt.workers.agents`).
"""

import argparse
import os
import signal
import sys
from datetime import timedelta

from flowrt.errors import EXIT_INTERRUPTED
from flowrt.transport.stores import store_at

DEADLINE = timedelta(minutes=5)


def main() -> int:
    parser = argparse.ArgumentParser(description="the rendezvous of torchruns on several hosts")
    parser.add_argument("--host", required=True, help="address of this host, as the others know it")
    parser.add_argument("--ready-fd", type=int, required=True, help="file descriptor to write HOST:PORT to")
    arguments = parser.parse_args()
    store = store_at(arguments.host, DEADLINE)
    os.write(arguments.ready_fd, f"{arguments.host}:{store.port}\n".encode())
    os.close(arguments.ready_fd)
    signal.sigwait({signal.SIGINT, signal.SIGTERM})
    return EXIT_INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
