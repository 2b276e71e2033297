"""The child process that calls reward functions. `flowrt.rewards.guard` starts it; `flowrt.rewards.pool` talks to it.

Messages are msgpack, on a stream socket:

| from | message | meaning |
|---|---|---|
| child | ``["ready"]``, or ``["unusable", function, what, line]`` | all functions are loaded, or one cannot be |
| pool | ``[[call, function, response, row], ...]`` | calls; the row is JSON of its columns, with the answer |
| child | ``["began", call]`` | the deadline of the call starts |
| child | ``["done", call, result, value, parts, detail, line, worn]`` | a `RewardOutcome`; worn: replace the child |

The first message is sent once, after the start.
"""

import importlib
import json
import os
import resource
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgpack

from flowrt.errors import ConfigError
from flowrt.rewards.built_in import Scorer, built_in
from flowrt.rewards.functions import RewardFunction, TaskReward
from flowrt.rewards.outcomes import Result, RewardOutcome
from flowrt.rewards.user_file import Unusable, UserFilter, UserReward, described, line_of
from flowrt.runtime.waits import BoundedElsewhere, blocking

RECV_BYTES = 1 << 20
MAX_MESSAGE_BYTES = 1 << 31
MAX_FILE_BYTES = 1 << 30
MAX_OPEN_FILES = 1024
MORE_THREADS = 512
"""Number of processes and threads of the user allowed beyond those that run on the machine at the start."""
POOL = BoundedElsewhere("the end of the pool, which closes the socket")
UNPACKING: Mapping[str, Any] = {"raw": False, "unicode_errors": "surrogatepass", "max_buffer_size": MAX_MESSAGE_BYTES}


def packed(message: Sequence[object]) -> bytes:
    """A message as msgpack bytes."""
    data: bytes = msgpack.packb(message, unicode_errors="surrogatepass")
    return data


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of calls."""

    memory_bytes: int
    """Address space that calls may use in addition to that after loading, in bytes."""
    sandbox: str
    """How function ``code`` runs programs: bwrap or limits."""
    task: TaskReward | None
    """The reward of a task, for a function of kind "task"."""
    timeout_s: float
    """Deadline of a call in seconds, kept by the pool; programs of function ``code`` end before it."""


def serve(connection: socket.socket, functions: Sequence[RewardFunction], limits: Limits) -> None:
    """Load the functions, then make calls until the pool closes the connection.

    Args:
        connection: socket to the pool.
        functions: the functions of the run that are not requests.
        limits: limits of the calls.
    """
    scorers: list[Scorer] = []
    for index, function in enumerate(functions):
        try:
            scorers.append(_loaded(function, index, limits))
        except BaseException as error:  # noqa: BLE001 (user code: any exception is reported)
            is_sentence = isinstance(error, (Unusable, ConfigError))
            what = str(error) if is_sentence else f"{described(error)}, while the file was loaded"
            connection.sendall(packed(["unusable", index, what, line_of(error, function.path)]))
            return
    first_bytes = _address_space()
    _limit(first_bytes + limits.memory_bytes)
    connection.sendall(packed(["ready"]))
    unpacker = msgpack.Unpacker(**UNPACKING)
    process = os.getpid()
    while data := blocking(partial(connection.recv, RECV_BYTES), POOL, "calls", "the pool"):
        unpacker.feed(data)
        for calls in unpacker:
            last = b""  # an outcome is sent together with the next "began"
            for call, function_index, response, row in calls:
                connection.sendall(last + packed(["began", call]))
                path = functions[function_index].path
                one = _called(scorers[function_index], path, response, row)
                if os.getpid() != process:
                    os._exit(0)  # this is a fork of the child, made by the function
                worn = one.result is Result.MEMORY and _address_space() > first_bytes + limits.memory_bytes // 2
                done = ["done", call, one.result, one.value, dict(one.parts), one.detail, one.line, worn]
                last = packed(done)
            connection.sendall(last)


def _loaded(function: RewardFunction, index: int, limits: Limits) -> Scorer:
    match function.kind:
        case "file":
            return UserReward(function.argument, index)
        case "filter":
            return UserFilter(function.argument, index)
        case "task":
            if limits.task is None:
                raise Unusable("it is called only in a run of its task")
            # Imported by name, because this package must not depend on those of tasks.
            scorer: Scorer = importlib.import_module(limits.task.module).scorer(limits.task.configuration)
            return scorer
        case "code":
            from flowrt.rewards.code import sandboxed  # imported here, so that a child starts fast
            from flowrt.rewards.programs.sandbox import Sandbox

            return partial(sandboxed, sandbox=Sandbox(limits.sandbox, limits.memory_bytes), timeout_s=limits.timeout_s)
    return built_in(function)


def _called(score: Callable[..., RewardOutcome], path: str, response: str, row: bytes) -> RewardOutcome:
    try:
        columns = json.loads(row)
        return score(response, columns.pop("answer", None), columns)
    except MemoryError as error:
        return RewardOutcome(Result.MEMORY, detail="it ran out of memory", line=line_of(error, path))
    except BaseException as error:  # noqa: BLE001 (user code: any exception is an outcome)
        what = str(error) if isinstance(error, Unusable) else described(error)
        return RewardOutcome(Result.ERROR, detail=what, line=line_of(error, path))


def _limit(address_space: int) -> None:
    """Set resource limits of this process; ``address_space`` is in bytes."""
    threads = int(_words("/proc/loadavg")[3].partition("/")[2]) if os.path.exists("/proc/loadavg") else 1 << 16
    for name, limit in (
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, MAX_FILE_BYTES),
        (resource.RLIMIT_NOFILE, MAX_OPEN_FILES),
        (resource.RLIMIT_AS, address_space),
        (resource.RLIMIT_NPROC, threads + MORE_THREADS),
    ):
        if name == resource.RLIMIT_AS and not _address_space():
            continue  # the size of this process is unknown
        hard = resource.getrlimit(name)[1]
        limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        # A process for the tests of function code may take more: they can be large.
        resource.setrlimit(name, (limit, hard if name == resource.RLIMIT_AS else limit))


def _address_space() -> int:
    """Size of the address space of this process, in bytes; 0 on systems other than Linux."""
    return int(_words("/proc/self/statm")[0]) * resource.getpagesize() if os.path.exists("/proc/self/statm") else 0


def _words(path: str) -> list[str]:
    with open(path) as file:
        return file.read().split()
