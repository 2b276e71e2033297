"""The processes of bench/weights.py: a controller, a trainer that only publishes, workers that only receive."""

import asyncio
import tempfile
import time
from contextlib import AsyncExitStack
from pathlib import Path

import torch
from common.links import Orders

from flowrt.api import (
    Column,
    Dataflow,
    DelayedUpdate,
    Fifo,
    GroupCount,
    Policies,
    Session,
    Settings,
    Snapshot,
    Stage,
    StrictLag,
    connect,
    controller,
)
from flowrt.engines.hf import named_parameters
from flowrt.engines.tiny_model import build_model
from flowrt.net.curve_keys import worker_keys, write_keys

MODEL = "policy"
JOIN_S = 20.0
GENERATED = Dataflow(
    (Column("prompt", "int32", "group"), Column("response", "int32", "slot"), Column("logprobs", "float32", "slot")),
    (Stage("rollout", ("prompt",), ("response", "logprobs", "truncated"), generates=True),),
)
VOCABULARY, WIDTH, LAYERS = 64, 256, 6


def small_model() -> torch.nn.Module:
    """A model with random weights; about one token in 64 is the end token."""
    model: torch.nn.Module = build_model(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        layers=LAYERS,
        heads=4,
        intermediate_size=4 * WIDTH,
        max_length=512,
        seed=1,
    )
    return model


def controller_orders() -> Orders:
    torch.set_num_threads(1)
    stack = AsyncExitStack()

    async def serve(host: str) -> tuple[str, Path]:
        """Start a controller; returns its address and the directory of the keys that workers need."""
        run_dir = stack.enter_context(tempfile.TemporaryDirectory(prefix="flowrt-bench-"))
        policies = Policies(StrictLag(1_000_000), Fifo(), GroupCount(1), DelayedUpdate())
        keys = Path(run_dir) / "keys"
        write_keys(keys, [])
        running = controller(GENERATED, Settings(), policies, Path(run_dir), f"tcp://{host}:0", keys=keys)
        _, address = await stack.enter_async_context(running)
        return address, keys

    async def stop() -> None:
        await stack.aclose()

    return {"serve": serve, "stop": stop}


def trainer_orders() -> Orders:
    torch.set_num_threads(1)
    session: Session
    tensors: dict[str, torch.Tensor]

    async def join(address: str, keys: Path, megabytes: int) -> int:
        """Connect a trainer with ``megabytes`` MB of weights (0: the small model); returns the bytes of a version."""
        nonlocal session, tensors
        session = await connect(address, "trainer", "trainer", JOIN_S, worker_keys(keys, "trainer"))
        if megabytes:
            size = 1_000_000 * megabytes // 16
            tensors = {str(part): torch.randint(0, 256, (size,), dtype=torch.uint8) for part in range(16)}
        else:
            tensors = {name: parameter.detach().clone() for name, parameter in named_parameters(small_model()).items()}
        return sum(tensor.nbytes for tensor in tensors.values())

    async def publish(version: int) -> float:
        """Publish a version; returns when this began, on the monotonic clock that all processes share."""
        for tensor in tensors.values():  # every element changes, so no delta is sent
            if tensor.is_floating_point():
                tensor += 1e-4 * torch.randn_like(tensor)
            else:
                tensor.random_(0, 256)
        snapshot = Snapshot.take(version, tensors)
        begun_s = time.monotonic()
        await session.params.publish(MODEL, snapshot)
        return begun_s

    async def publish_every(period_s: float, versions: int, first: int) -> None:
        begun_s = time.monotonic()
        for number in range(versions):
            await asyncio.sleep(begun_s + number * period_s - time.monotonic())
            await publish(first + number)

    async def offer(prompts: int) -> None:
        rows = [torch.arange(2, 18, dtype=torch.int32) for _ in range(prompts)]
        await session.offer_many("prompts", range(prompts), tensors={"prompt": rows})

    return {"join": join, "publish": publish, "publish_every": publish_every, "offer": offer}


def receiver_orders() -> Orders:
    torch.set_num_threads(1)
    session: Session

    async def join(address: str, keys: Path, name: str) -> None:
        nonlocal session
        session = await connect(address, name, "rollout", JOIN_S, worker_keys(keys, name))
        session.params.applied(MODEL, 0)

    async def hold(version: int) -> float:
        """Wait for this version or a newer one; returns when it had arrived, on the monotonic clock."""
        while True:
            staged = await session.params.wait_staged(MODEL)
            session.params.applied(MODEL, staged.snapshot.version)
            if staged.snapshot.version >= version:
                return time.monotonic()

    return {"join": join, "hold": hold}
