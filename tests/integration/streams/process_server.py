"""Forks the processes of these tests, with Python and torch loaded once; their standard pipes are held by the test."""

import json
import os
import signal
import socket
import sys
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, NoReturn

import torch

from flowrt import api
from tests.integration.helpers.forked_ranks import exit_after
from tests.integration.streams.stream_process import ROLES

Roles = Mapping[str, Callable[..., Coroutine[Any, Any, None]]]


def child(roles: Roles, role: str, options: dict[str, Any]) -> NoReturn:
    """Run a role in the forked process."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    torch.set_num_threads(1)
    exit_after(lambda: api.run_loop(roles[role](**options)))


def fork_server(requests: socket.socket, roles: Roles) -> None:
    """Fork a child for each request, until the test closes the socket."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no process waits for children: their pipes close at exit
    while True:
        data, pipes, _, _ = socket.recv_fds(requests, 65536, 2)
        if not data:
            return
        pid = os.fork()
        if pid == 0:
            requests.close()
            os.dup2(pipes[0], 0)
            os.dup2(pipes[1], 1)
        for pipe in pipes:
            os.close(pipe)
        if pid == 0:
            child(roles, **json.loads(data))
        requests.send(str(pid).encode())


if __name__ == "__main__":
    fork_server(socket.socket(fileno=int(sys.argv[1])), ROLES)
    os._exit(0)  # an orderly exit with torch loaded takes seconds
