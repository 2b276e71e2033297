"""Every wait of the product goes through `flowrt.runtime.waits`, or is listed here with its reason."""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import TypeGuard

import pytest

ROOT = Path(__file__).parents[2]
PRIMITIVE = ROOT / "flowrt" / "runtime/waits.py"
PRODUCT = sorted(path for folder in ("flowrt", "workers", "launch") for path in (ROOT / folder).rglob("*.py"))
ALLOWED_WAITS = {
    # Simulated time: waits for no other process, and an interrupt sets the event.
    ("flowrt/engines/simulated/time.py", "interrupt.wait"),
    # Implements torch's Store, whose wait is called by torch; inside it is `until_true`.
    ("flowrt/transport/lanes/channel.py", "self.wait"),
    # Posts a receive and returns at once; `blocking` waits for its end.
    ("flowrt/transport/lanes/gloo.py", "group.recv"),
    ("flowrt/transport/lanes/device.py", "self._group.recv"),
    # Called when there is something to read.
    ("flowrt/launcher/fork_server/parent.py", "orders.recv"),
    ("flowrt/launcher/fork_server/child.py", "socket.recv_fds"),
    # Whether a process has ended; returns at once.
    ("flowrt/engines/server/process.py", "self._process.poll"),
    # Whether children have ended; returns at once.
    ("flowrt/rewards/reaper.py", "os.waitpid"),
    # Called when there is something to read.
    ("flowrt/rewards/reaper.py", "control.recv"),
    # Of processes that were killed.
    ("flowrt/rewards/programs/descendants.py", "os.waitpid"),
    # In the process for programs, which its caller kills at the deadline of the call.
    ("flowrt/rewards/programs/process.py", "os.waitpid"),
    ("flowrt/rewards/programs/process.py", "os.waitid"),
    ("flowrt/rewards/programs/process.py", "select.poll"),
    ("flowrt/rewards/programs/process.py", "poller.poll"),
    ("flowrt/rewards/programs/process.py", "sys.stdin.readline"),
    # Whether that process has ended; returns at once.
    ("flowrt/rewards/programs/sandbox.py", "self._process.poll"),
    # The deadline of a call of an async reward function, and that call.
    ("flowrt/rewards/child.py", "asyncio.timeout"),
    ("flowrt/rewards/child.py", "scope"),
    # Other outcomes, which the pool reads.
    ("flowrt/rewards/child.py", "self._sending"),
    # Of a child that has ended, or was killed.
    ("flowrt/launcher/fork_server/child.py", "os.waitpid"),
    # Waits until the process is terminated; it dies with its parent.
    ("flowrt/ranks/rendezvous.py", "signal.sigwait"),
    # The messages of a connection, which ends when heartbeats are not answered; the callers have deadlines, too.
    ("flowrt/client/session.py", "self._connection"),
    ("flowrt/launcher/observer.py", "connection"),
    ("flowrt/launcher/drain_command.py", "statuses(connection)"),
    # As a write to a blocking descriptor, until the reader takes the output or goes away.
    ("flowrt/runtime/standard_streams.py", "select.select"),
    # zmq's own thread is told to end within LINGER.
    ("flowrt/net/link.py", "self._context.term"),
}
"""Waits that are no calls of the primitive, each with its reason."""

ALLOWED_AWAITS = {
    (
        "flowrt/client/connection.py",
        "self._arrival",
    ): "a message, or the loss of a controller that answers no heartbeat",
    ("flowrt/client/requests.py", "request.reply"): "`tracked` around it; a timer of the loop ends it",
    ("flowrt/client/weights.py", "arrived"): "a lane's receipt, which the lane ends",
    ("flowrt/client/session.py", "task"): "done: it was awaited with `first_of`",
    ("flowrt/client/streams.py", "following"): "a pull, which has a deadline",
    ("flowrt/client/streams.py", "committing"): "a commit, which has a deadline",
    (
        "flowrt/controller/server/server.py",
        "task",
    ): "a controller server that was told to end, which closes its connections after a timeout",
    ("flowrt/engines/sglang/weights.py", "sending"): "a broadcast within the timeout of its group",
    ("flowrt/runtime/event_loop.py", "work"): "the main coroutine of a process, not a wait",
    (
        "flowrt/roles/main.py",
        "ended",
    ): "the end of the session, within the timeout for a silent controller",
    ("flowrt/launcher/doctor/probe.py", "arriving"): "a lane's receipt, which the lane ends",
    (
        "flowrt/rewards/programs/proxies.py",
        "coroutine",
    ): "a coroutine of a program, in the process for programs, which its caller kills at the deadline of the call",
    ("flowrt/roles/rollout.py", "running"): "a run of the engine, which was interrupted",
    ("flowrt/roles/trainer.py", "following"): "a pull, which has a deadline",
}
"""Tasks and futures that are awaited by name, and what ends each."""

RANKS = (
    "trainer.rank_timeout_s: timeout of the group of `ranks.process_group.init_ranks`; `ranks.barrier` names the ranks"
)
COLLECTIVES = {
    ("flowrt/engines/torch/trainer.py", "dist.all_reduce"): RANKS,
    ("flowrt/engines/training/loss_passes.py", "dist.all_reduce"): RANKS,
    ("flowrt/engines/training/deferred.py", "dist.all_reduce"): RANKS,
    ("flowrt/engines/training/deferred.py", "dist.all_gather"): RANKS,
    ("flowrt/engines/training/saved_state.py", "dist.all_gather"): RANKS,
    ("flowrt/engines/fsdp/trainer.py", "dist.all_reduce"): RANKS,
    ("flowrt/engines/fsdp/sharding.py", "part.unshard"): RANKS,
    ("flowrt/engines/fsdp/sharding.py", "tensor.full_tensor"): RANKS,
    ("flowrt/engines/fsdp/sharding.py", "distribute_tensor"): RANKS,
    ("flowrt/engines/fsdp/sharding.py", "dist.broadcast"): RANKS,
    ("flowrt/engines/fsdp/sharding.py", "init_device_mesh"): RANKS,
    ("flowrt/engines/fsdp/checkpoint.py", "dcp.save"): RANKS,
    ("flowrt/engines/fsdp/checkpoint.py", "dcp.load"): RANKS,
}
"""Where ranks wait for each other inside torch.distributed, each with its deadline."""
COLLECTIVE_CALLS = {
    *("all_reduce", "all_gather", "all_gather_into_tensor", "all_gather_object", "all_to_all", "all_to_all_single"),
    *("barrier", "monitored_barrier", "broadcast", "broadcast_object_list", "gather", "gather_object", "reduce"),
    *("reduce_scatter", "reduce_scatter_tensor", "scatter", "scatter_object_list", "send", "recv", "batch_isend_irecv"),
}
SHARD_CALLS = {"full_tensor", "unshard", "distribute_tensor", "init_device_mesh"}

ASYNCIO = {"wait", "wait_for", "timeout", "timeout_at", "sleep", "gather", "as_completed"}
BLOCKING = {
    *("wait", "wait_for", "acquire", "accept", "communicate", "recv_into", "recvfrom", "term", "getoutput"),
    *("waitpid", "waitid", "wait3", "wait4", "sigwait", "sigwaitinfo", "sigtimedwait"),
    *("readline", "readexactly", "readuntil", "wait_closed"),
}
CONNECTING = {"create_connection", "open_connection", "urlopen"}
RECEIVING = {"recv", "recv_fds", "recv_multipart", "recvmsg", "poll", "select"}
PROCESSES = {"run", "call", "check_call", "check_output"}


def waits(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Calls that may wait: line and called function."""
    passed = {id(argument) for node in ast.walk(tree) if _is_primitive(node) for argument in node.args}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and _waits(node) and id(node) not in passed:
            yield node.lineno, ast.unparse(node.func)
        if isinstance(node, ast.AsyncFor) or (isinstance(node, ast.comprehension) and node.is_async):
            yield node.iter.lineno, ast.unparse(node.iter)
        if isinstance(node, ast.AsyncWith):  # a lock appears as a name
            for item in node.items:
                if isinstance(item.context_expr, ast.Name | ast.Attribute):
                    yield node.lineno, ast.unparse(item.context_expr)


def _is_primitive(node: ast.AST) -> TypeGuard[ast.Call]:
    """Calls that wait for the coroutines that are passed to them."""
    name = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
    return name in ("wait_until", "self.unless_ended")


def _waits(call: ast.Call) -> bool:
    if not isinstance(call.func, ast.Attribute):
        return isinstance(call.func, ast.Name) and call.func.id in ("sleep", "wait_for", "gather")
    name, owner = call.func.attr, ast.unparse(call.func.value)
    source = ast.unparse(call)
    if owner in ("asyncio", "time"):
        return name in ASYNCIO
    if owner == "subprocess":
        return name in PROCESSES
    if name in RECEIVING:
        return "NOBLOCK" not in source
    if name == "join":  # of a thread or queue: the only argument is a timeout; str.join takes an iterable
        text = isinstance(call.func.value, ast.Constant | ast.JoinedStr)
        return not text and len(call.args) + len(call.keywords) <= 1 and owner not in ("os.path", "shlex")
    if name == "get":
        return not call.args or any(keyword.arg in ("timeout", "block") for keyword in call.keywords)
    if name == "result":
        return bool(call.args or call.keywords) or "run_coroutine_threadsafe" in owner or ".submit(" in owner
    if name in ("flock", "lockf"):
        return "LOCK_NB" not in source
    if name == "init_process_group" or name in CONNECTING:
        return all(keyword.arg != "timeout" for keyword in call.keywords)
    return name in BLOCKING


def collectives(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Collective operations that are called or passed as a function: line and name."""
    passed = {id(argument) for node in ast.walk(tree) if _is_rank_call(node) for argument in node.args}
    for node in ast.walk(tree):
        if id(node) in passed:
            continue
        if isinstance(node, ast.Attribute):
            owner = ast.unparse(node.value)
            of_group = owner in ("dist", "torch.distributed") and node.attr in COLLECTIVE_CALLS
            if of_group or node.attr in SHARD_CALLS or (owner == "dcp" and node.attr in ("save", "load")):
                yield node.lineno, f"{owner}.{node.attr}"
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in SHARD_CALLS:
            yield node.lineno, node.func.id


def _is_rank_call(node: ast.AST) -> TypeGuard[ast.Call]:
    """`call` of `flowrt.ranks.barrier`, which has a deadline and names the missing ranks."""
    return isinstance(node, ast.Call) and ast.unparse(node.func) in ("ranks.call", "self._ranks.call")


@pytest.mark.slow
def test_collectives_are_called_only_where_a_deadline_is_known() -> None:
    calls = {
        (str(path.relative_to(ROOT)), call): line
        for path in PRODUCT
        for line, call in collectives(ast.parse(path.read_text()))
    }
    new = [f"{path}:{line} {call}" for (path, call), line in calls.items() if (path, call) not in COLLECTIVES]
    assert not new, (
        f"ranks wait for each other here: use flowrt.ranks.barrier, or list the deadline that ends it: {new}"
    )
    assert not COLLECTIVES.keys() - set(calls), "exceptions that are not needed any more"


def test_trainer_roles_run_no_engine_method_by_plain_to_thread() -> None:
    """Engine methods are collective, and `asyncio.to_thread` has no deadline."""
    for name in ("trainer", "checkpoints"):
        tree = ast.parse((ROOT / "flowrt" / "roles" / f"{name}.py").read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "asyncio.to_thread":
                arguments = " ".join(ast.unparse(argument) for argument in node.args)
                assert "engine." not in arguments, f"flowrt/roles/{name}.py:{node.lineno} {arguments}"


def awaited(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Awaits of a task or a future that was created elsewhere: line and name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Await) and isinstance(node.value, ast.Name | ast.Attribute | ast.Subscript):
            yield node.lineno, ast.unparse(node.value)


def test_every_awaited_task_has_a_known_end() -> None:
    awaits = {
        (str(path.relative_to(ROOT)), name): line
        for path in PRODUCT
        if path != PRIMITIVE
        for line, name in awaited(ast.parse(path.read_text()))
    }
    new = [f"{path}:{line} {name}" for (path, name), line in awaits.items() if (path, name) not in ALLOWED_AWAITS]
    assert not new, f"use flowrt.runtime.waits.wait_until, or list what ends these: {new}"
    assert not ALLOWED_AWAITS.keys() - set(awaits), "exceptions that are not needed any more"


@pytest.mark.parametrize(
    ("code", "detected"),
    [
        ("dist.barrier()", True),
        ("asyncio.to_thread(dist.barrier)", True),
        ("torch.distributed.all_reduce(x)", True),
        ("work(lambda: dist.broadcast(x, 0))", True),
        ("x.full_tensor()", True),
        ("distribute_tensor(x, mesh, places)", True),
        ("dcp.save(state)", True),
        ("ranks.call(dist.barrier, what)", False),
        ("dist.get_rank()", False),
        ("socket.send(x)", False),
    ],
)
def test_the_check_detects_collectives(code: str, detected: bool) -> None:
    assert bool(list(collectives(ast.parse(code)))) is detected


@pytest.mark.slow
def test_every_wait_goes_through_the_primitive() -> None:
    calls = {
        (str(path.relative_to(ROOT)), call): line
        for path in PRODUCT
        if path != PRIMITIVE
        for line, call in waits(ast.parse(path.read_text()))
    }
    new = [f"{path}:{line} {call}" for (path, call), line in calls.items() if (path, call) not in ALLOWED_WAITS]
    assert not new, f"these waits bypass flowrt.runtime.waits: {new}"
    assert not ALLOWED_WAITS - set(calls), "exceptions that are not needed any more"


@pytest.mark.parametrize(
    "code",
    [
        "await asyncio.wait_for(x, 5)",
        "await asyncio.wait({a, b})",
        "async with asyncio.timeout(3): pass",
        "async with self._lock: pass",
        "await asyncio.sleep(1)",
        "await asyncio.gather(a, b)",
        "await event.wait()",
        "work.wait()",
        "condition.wait_for(lambda: True, 3)",
        "await process.wait()",
        "process.communicate()",
        "items.get()",
        "items.get(timeout=3)",
        "items.get(block=True)",
        "thread.join()",
        "thread.join(3.0)",
        "time.sleep(1)",
        "socket.recv(4)",
        "socket.recv_fds(one, 8, 1)",
        "listener.accept()",
        "lock.acquire()",
        "asyncio.run_coroutine_threadsafe(work, loop).result()",
        "executor.submit(work).result()",
        "future.result(3)",
        "subprocess.run(['ls'])",
        "dist.init_process_group('gloo')",
        "zmq_socket.poll(100)",
        "context.term()",
        "os.waitpid(pid, 0)",
        "signal.sigwait({2})",
        "fcntl.flock(fd, fcntl.LOCK_EX)",
        "await reader.readline()",
        "await writer.wait_closed()",
        "socket.create_connection((host, port))",
        "urllib.request.urlopen(url)",
        "async for line in reader: pass",
        "x = [one async for one in stream]",
    ],
)
def test_the_check_detects_each_kind_of_wait(code: str) -> None:
    if "await" in code or "async " in code:
        code = f"async def one():\n    {code}"
    assert len(list(waits(ast.parse(code)))) >= 1


@pytest.mark.parametrize(
    "code",
    [
        "wait_until(event.wait(), 3, what, turn)",
        "', '.join(names)",
        "f'{a} '.join(names)",
        "table.get('key')",
        "task.result()",
        "fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)",
        "membership.join(worker, role, now)",
    ],
)
def test_the_check_ignores_calls_that_do_not_wait(code: str) -> None:
    assert not list(waits(ast.parse(code)))
