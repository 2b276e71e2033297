"""The child process that calls reward functions. `flowrt.rewards.reaper` starts it; `flowrt.rewards.pool` talks to it.

Messages are msgpack, on a stream socket:

| from | message | meaning |
|---|---|---|
| child | ``["ready", 0, forms]``, or ``["unusable", function, what, line]`` | all functions are loaded (the \
`CallForm` of each), or one cannot be |
| pool | ``[[call, function, [[response, row, facts], ...]], ...]`` | calls, each with one or more `RewardSample` |
| child | ``["began", call]`` | the deadline of the call starts |
| child | ``["done", call, [[result, value, parts, detail, line], ...], worn]`` | a `RewardOutcome` a sample; worn: \
replace the child |

The number of a call is random, so that a function that writes to the socket cannot guess it: a message with another
number, or that cannot be read, is the end of the child for the pool.

The first message is sent once, after the start. After an empty message from the pool the child makes calls side by
side, which are of async functions; without, one after the other.
"""

import asyncio
import contextlib
import importlib
import os
import resource
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import msgpack

from flowrt.errors import ConfigError
from flowrt.rewards.built_in import Scorer, built_in
from flowrt.rewards.call_forms import CallForm, RewardSample
from flowrt.rewards.outcomes import Result, RewardOutcome
from flowrt.rewards.reward_names import RewardFunction, TaskReward
from flowrt.rewards.rows import decode_row
from flowrt.rewards.user_file import ANSWER, MISSING, UserFilter, no_column
from flowrt.rewards.user_reward import UserReward
from flowrt.runtime.user_module import Unusable, described, line_of
from flowrt.runtime.waits import BoundedElsewhere, blocking, wait_until

RECV_BYTES = 1 << 20
MAX_MESSAGE_BYTES = 1 << 31
MAX_FILE_BYTES = 1 << 30
MAX_OPEN_FILES = 1024
NEEDED = {"exact": "answer", "math": "answer", "regex": "answer", "code": "tests"}
"""The column that a built-in function compares with; one that is null in a row does not apply to the row."""
MODEL, TOKENIZERS = "flowrt.roles.reward_model", "flowrt.engines.hf"
"""Modules that few functions need."""
MORE_THREADS = 512
"""Number of processes and threads of the user allowed beyond those that run on the machine at the start."""
POOL = BoundedElsewhere("the end of the pool, which closes the socket")
UNPACKING: Mapping[str, Any] = {
    "raw": False,
    "unicode_errors": "surrogatepass",
    "max_buffer_size": MAX_MESSAGE_BYTES,
    "max_array_len": 1 << 24,  # msgpack allocates an array when it reads the length
}


def packed(message: Sequence[object]) -> bytes:
    """A message as msgpack bytes."""
    data: bytes = msgpack.packb(message, unicode_errors="surrogatepass")
    return data


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of calls."""

    memory_bytes: int
    """Memory that calls may take in addition to that after loading, in bytes: address space, or with a device that is
    not the CPU, whose driver reserves address space at any time, private memory that can be written."""
    sandbox: str
    """How function ``code`` runs programs: bwrap or limits."""
    task: TaskReward | None
    """The reward of a task, for a function of kind "task"."""
    timeout_s: float
    """Deadline of a call in seconds, kept by the pool; programs of function ``code`` end before it."""
    model: str = ""
    """Directory of the run's model, for functions that take its tokenizer; empty if it is not built yet."""
    device: str = "cpu"
    """Device of a reward model, as torch names it."""


class Loaded(Protocol):
    """A function that is loaded."""

    @property
    def form(self) -> CallForm: ...

    def __call__(self, samples: Sequence[RewardSample]) -> list[RewardOutcome]:
        """The outcome of each sample. Raises any exception of the function."""
        ...

    async def call_async(self, samples: Sequence[RewardSample]) -> list[RewardOutcome]:
        """As `__call__`, for an async function."""
        ...


def serve(connection: socket.socket, functions: Sequence[RewardFunction], limits: Limits) -> None:
    """Load the functions, then make calls until the pool closes the connection.

    Args:
        connection: socket to the pool.
        functions: the functions of the run that are not requests.
        limits: limits of the calls.
    """
    loaded: list[Loaded] = []
    for index, function in enumerate(functions):
        try:
            loaded.append(_loaded(function, index, limits))
        except BaseException as error:  # noqa: BLE001 (user code: any exception is reported)
            is_sentence = isinstance(error, (Unusable, ConfigError))
            what = str(error) if is_sentence else f"{described(error)}, while the file was loaded"
            connection.sendall(packed(["unusable", index, what, line_of(error, function.path)]))
            return
    child = _Child(connection, functions, loaded, limits)
    connection.sendall(
        packed(["ready", 0, [[reward.form.form, reward.form.is_async, reward.form.facts] for reward in loaded]])
    )
    while data := blocking(partial(connection.recv, RECV_BYTES), POOL, "calls", "the pool"):
        child.unpacker.feed(data)
        for calls in child.unpacker:
            if not calls:
                asyncio.run(child.make_async())
                return
            child.make(calls)


class _Child:
    """Makes calls: one after the other, or, of async functions, as many as the pool sends at a time."""

    def __init__(
        self, connection: socket.socket, functions: Sequence[RewardFunction], loaded: Sequence[Loaded], limits: Limits
    ) -> None:
        self._connection = connection
        self._functions = functions
        self._loaded = loaded
        self._timeout_s = limits.timeout_s
        self._process = os.getpid()
        self._limited = resource.RLIMIT_AS if limits.device.startswith("cpu") else resource.RLIMIT_DATA
        self._first_bytes = _memory(self._limited)
        self._limit_bytes = limits.memory_bytes
        self._sending = asyncio.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self.unpacker = msgpack.Unpacker(**UNPACKING)
        _limit(self._limited, self._first_bytes + limits.memory_bytes)

    def make(self, calls: Sequence[Any]) -> None:
        """Make calls, one after the other."""
        last = b""  # outcomes are sent together with the next "began"
        for call, function, samples in calls:
            self._connection.sendall(last + packed(["began", call]))
            if self._loaded[function].form.is_async:
                self._loop = self._loop or asyncio.new_event_loop()
                outcomes = self._loop.run_until_complete(self._within_deadline(function, samples))
            else:
                outcomes = self._outcomes(function, samples)
            if os.getpid() != self._process:
                os._exit(0)  # this is a fork of the child, made by the function
            last = self._done(call, outcomes)
        self._connection.sendall(last)

    def _outcomes(self, function: int, samples: Sequence[Any]) -> list[RewardOutcome]:
        try:
            return self._loaded[function](_samples(samples))
        except BaseException as error:  # noqa: BLE001 (user code: any exception is an outcome)
            return [_failure(error, self._functions[function].path)] * len(samples)

    async def _within_deadline(self, function: int, samples: Sequence[Any]) -> list[RewardOutcome]:
        """The outcomes of a call of an async function, which is ended at its deadline."""
        path = self._functions[function].path
        scope = asyncio.timeout(self._timeout_s)
        try:
            async with scope:
                return await self._loaded[function].call_async(_samples(samples))
        except BaseException as error:  # noqa: BLE001 (user code: any exception is an outcome)
            outcome = _failure(error, path)
            if scope.expired() and isinstance(error, TimeoutError):
                line = line_of(error.__cause__ or error, path)
                what = f"it did not return in {self._timeout_s:g} s"
                outcome = RewardOutcome(Result.TIMEOUT, detail=what, line=line)
            return [outcome] * len(samples)

    async def make_async(self) -> None:
        """Make calls of async functions side by side, until the pool ends the child."""
        loop = asyncio.get_running_loop()
        self._connection.setblocking(False)
        running: set[asyncio.Task[None]] = set()

        def start(several: Sequence[Any]) -> None:
            for call, function, samples in several:
                task = asyncio.create_task(self._call(call, function, samples))
                running.add(task)
                task.add_done_callback(running.discard)

        for several in self.unpacker:
            start(several)
        while data := await wait_until(loop.sock_recv(self._connection, RECV_BYTES), POOL, "calls", "the pool"):
            self.unpacker.feed(data)
            for several in self.unpacker:
                start(several)

    async def _call(self, call: int, function: int, samples: Sequence[Any]) -> None:
        await self._began(call)
        outcomes = await self._within_deadline(function, samples)
        if os.getpid() != self._process:
            os._exit(0)
        await self._send(self._done(call, outcomes))

    async def _began(self, call: int) -> None:
        """Tell the pool that a call begins, if possible without a step of other calls before it begins."""
        data = packed(["began", call])
        sent = 0
        if not self._sending.locked():
            with contextlib.suppress(BlockingIOError):
                sent = self._connection.send(data)
        if sent < len(data):
            await self._send(data[sent:])

    async def _send(self, data: bytes) -> None:
        async with self._sending:
            sending = asyncio.get_running_loop().sock_sendall(self._connection, data)
            await wait_until(sending, POOL, "outcomes to be read", "the pool")

    def _done(self, call: int, outcomes: Sequence[RewardOutcome]) -> bytes:
        is_worn = any(outcome.result is Result.MEMORY for outcome in outcomes)
        is_worn = is_worn and _memory(self._limited) > self._first_bytes + self._limit_bytes // 2
        rows = [
            [outcome.result, outcome.value, dict(outcome.parts), outcome.detail, outcome.line] for outcome in outcomes
        ]
        return packed(["done", call, rows, is_worn])


def _samples(samples: Sequence[Any]) -> list[RewardSample]:
    return [RewardSample(response, row, facts) for response, row, facts in samples]


def _failure(error: BaseException, path: str) -> RewardOutcome:
    """The outcome of a call that raised."""
    if isinstance(error, MemoryError):
        return RewardOutcome(Result.MEMORY, detail="it ran out of memory", line=line_of(error, path))
    what = str(error) if isinstance(error, Unusable) else described(error)
    return RewardOutcome(Result.ERROR, detail=what, line=line_of(error, path))


class _OfOne:
    """A function of this package, called with one sample."""

    form = CallForm()

    def __init__(self, score: Scorer, kind: str) -> None:
        self._score = score
        self._needed = NEEDED.get(kind, "")

    def __call__(self, samples: Sequence[RewardSample]) -> list[RewardOutcome]:
        (sample,) = samples
        columns = decode_row(sample.row)
        if self._needed == ANSWER and ANSWER not in columns:
            raise Unusable(f"it compares with the column {ANSWER!r}, and {no_column(ANSWER, columns)}")
        if self._needed and columns.get(self._needed, MISSING) is None:
            return [RewardOutcome(Result.NOT_APPLICABLE)]
        return [self._score(sample.response, columns.pop(ANSWER, MISSING), columns)]

    async def call_async(self, samples: Sequence[RewardSample]) -> list[RewardOutcome]:
        return self(samples)


def _loaded(function: RewardFunction, index: int, limits: Limits) -> Loaded:
    match function.kind:
        case "file":
            return UserReward(function.argument, index, partial(_tokenizer, limits.model))
        case "filter":
            return _OfOne(UserFilter(function.argument, index), function.kind)
        case "task":
            if limits.task is None:
                raise Unusable("it is called only in a run of its task")
            # Imported by name, because this package must not depend on those of tasks.
            scorer: Scorer = importlib.import_module(limits.task.module).scorer(limits.task.configuration)
            return _OfOne(scorer, function.kind)
        case "model":
            # By name, as the module of a task: it imports torch, which this package must not.
            model: Loaded = importlib.import_module(MODEL).RewardModel(function.argument, limits.device)
            return model
        case "code":
            from flowrt.rewards.code import sandboxed  # imported here, so that a child starts fast
            from flowrt.rewards.programs.sandbox import Sandbox

            sandbox = Sandbox(limits.sandbox, limits.memory_bytes)
            return _OfOne(partial(sandboxed, sandbox=sandbox, timeout_s=limits.timeout_s), function.kind)
    return _OfOne(built_in(function), function.kind)


def _tokenizer(model: str) -> object:
    """The tokenizer of the run's model; None if the model is not built yet."""
    if not model:
        return None
    tokenizer: object = importlib.import_module(TOKENIZERS).load_tokenizer(model)
    return tokenizer


def _limit(memory: int, memory_bytes: int) -> None:
    """Set resource limits of this process; ``memory``: RLIMIT_AS or RLIMIT_DATA."""
    threads = int(_words("/proc/loadavg")[3].partition("/")[2]) if os.path.exists("/proc/loadavg") else 1 << 16
    for name, limit in (
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, MAX_FILE_BYTES),
        (resource.RLIMIT_NOFILE, MAX_OPEN_FILES),
        (memory, memory_bytes),
        (resource.RLIMIT_NPROC, threads + MORE_THREADS),
    ):
        if name == memory and not _memory(memory):
            continue  # the size of this process is unknown
        hard = resource.getrlimit(name)[1]
        limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        # A process for the tests of function code may take more: they can be large.
        resource.setrlimit(name, (limit, hard if name == memory else limit))


def _memory(limited: int) -> int:
    """What this limit (RLIMIT_AS or RLIMIT_DATA) counts of this process, in bytes; 0 on systems other than Linux."""
    place = 0 if limited == resource.RLIMIT_AS else 5
    return int(_words("/proc/self/statm")[place]) * resource.getpagesize() if os.path.exists("/proc/self/statm") else 0


def _words(path: str) -> list[str]:
    with open(path) as file:
        return file.read().split()
