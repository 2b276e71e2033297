"""A module that the tests fork: prints the state of its process, and ends as its arguments say."""

import json
import os
import random
import signal
import sys

import numpy as np
import psutil

process = psutil.Process()
state = {
    "arguments": sys.argv[1:],
    "name": __name__,
    "random": [random.random(), np.random.random()],
    "own": os.environ.get("OWN"),
    "shared": os.environ.get("SHARED"),
    "command_line": process.cmdline()[0],
    "started_with": process.environ().get("SHARED"),
    "open_fds": sorted(int(fd) for fd in os.listdir("/proc/self/fd"))[:-1],  # the last is of the listing itself
    "is_session_leader": os.getsid(0) == os.getpid(),
}
sys.stdout.write(json.dumps(state) + "\n")
sys.stdout.flush()
match sys.argv[1]:
    case "exit":
        sys.exit(int(sys.argv[2]))
    case "fail":
        raise ValueError(sys.argv[2])
    case "write":
        os.write(int(sys.argv[2]), b"written\n")
    case "wait":
        signal.pause()
