"""A module that the tests fork: prints what it has, and ends as its arguments order."""

import json
import os
import random
import signal
import sys

import numpy as np
import psutil

me = psutil.Process()
found = {
    "arguments": sys.argv[1:],
    "name": __name__,
    "chances": [random.random(), np.random.random()],
    "own": os.environ.get("OWN"),
    "shared": os.environ.get("SHARED"),
    "line": me.cmdline()[0],
    "started_with": me.environ().get("SHARED"),
    "open": sorted(int(fd) for fd in os.listdir("/proc/self/fd"))[:-1],  # the last is that of the listing
    "leads": os.getsid(0) == os.getpid(),
}
sys.stdout.write(json.dumps(found) + "\n")
sys.stdout.flush()
match sys.argv[1]:
    case "leave":
        sys.exit(int(sys.argv[2]))
    case "fail":
        raise ValueError(sys.argv[2])
    case "say":
        os.write(int(sys.argv[2]), b"said\n")
    case "stay":
        signal.pause()
