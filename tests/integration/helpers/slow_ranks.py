"""Pairs of trainer ranks of which one is slow, each for another reason: python slow_ranks.py DIRECTORY CASE...

Packages are imported once; all cases are forked and run in parallel. Prints a JSON line for each rank.
"""

import asyncio
import contextlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import HuggingFaceStorageReader as StorageReader
from torch.distributed.checkpoint import HuggingFaceStorageWriter as StorageWriter

from flowrt.algorithms.objective import Kl, Objective
from flowrt.engines.base import TrainEngine, TrainingBatch
from flowrt.engines.exported_model import write_weights
from flowrt.engines.fsdp import sharding
from flowrt.engines.fsdp import trainer as fsdp_trainer
from flowrt.engines.fsdp.trainer import FsdpTrainer
from flowrt.engines.hf import load_model
from flowrt.engines.options import FsdpOptions, TrainOptions
from flowrt.engines.tiny_model import build_model, wrap_tokenizer
from flowrt.engines.torch import trainer as torch_trainer
from flowrt.engines.training.saved_state import write_tensors
from flowrt.errors import WaitExpired
from flowrt.ids import RANKS
from flowrt.protocol.messages import Position
from flowrt.ranks.barrier import RankCollectives
from flowrt.ranks.process_group import STORE_VARIABLE, init_ranks
from flowrt.recipes.checkpoint_checksums import write_checksums
from flowrt.recipes.config import CheckpointConfig, RunConfig, TrainerConfig
from flowrt.recipes.run_dir import checkpoint_steps
from flowrt.recipes.tasks.arithmetic import Arithmetic
from flowrt.roles import checkpoints, trainer
from flowrt.roles.checkpoints import Checkpoints
from flowrt.runtime.clock import MonotonicClock
from flowrt.runtime.parent_death import die_with_parent
from flowrt.runtime.progress import Progress
from flowrt.runtime.timeline import Timeline
from flowrt.transport.devices import choose

RANKS_S = 2.0
SLOW_S = 2.5 * RANKS_S
LOCK_STEP = FsdpOptions(gather="pass")


class StubSession:
    """The part of a session that is used here; samples for this rank arrive after ``gap_s``."""

    def __init__(self, gap_s: float = 0.0) -> None:
        self.welcome = SimpleNamespace(position=Position(0))
        self.progress = Progress()
        self.timeline = self
        self._gap_s = gap_s
        self._pulls = 0

    @contextlib.contextmanager
    def busy(self, kind: str) -> Iterator[None]:
        yield

    async def saved(self, step: int) -> None:
        pass

    async def pull(self, *_: object, **__: object) -> Any:
        self._pulls += 1
        if self._pulls == 1:
            await asyncio.sleep(self._gap_s)
        return SimpleNamespace(closed=self._pulls > 1)


def slowly(call: Callable[..., Any]) -> Callable[..., Any]:
    """The call, delayed the first time."""
    delays_s = iter([SLOW_S])

    def slow(*args: Any, **kwargs: Any) -> Any:
        time.sleep(next(delays_s, 0.0))
        return call(*args, **kwargs)

    return slow


def stopping(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def hanging(*_: object) -> None:
    threading.Event().wait()


async def saves(run_dir: Path, engine: TrainEngine | None = None) -> str:
    """Two checkpoints of which one is kept, each followed by a step of all ranks; the second is read again."""
    ranks, number = RankCollectives(), torch.ones(1)
    config = RunConfig(
        run_dir=str(run_dir), model=str(run_dir.with_name("from")), checkpoint=CheckpointConfig(every=1, keep=1)
    )
    model = build_model(vocab_size=32, hidden_size=16, layers=1, heads=2, intermediate_size=16, max_length=16, seed=3)
    engine = engine or torch_trainer.TorchTrainer(model, TrainOptions(), Objective(kl=Kl(1e-3)), temperature=1.0)
    session: Any = StubSession()
    saver = Checkpoints(session, config, engine, ranks)
    for step in (1, 2):
        await saver.save(step)
        await ranks.call(lambda: dist.all_reduce(number), f"step {step}")
    session.welcome.position = Position(2)
    await saver.load()
    return f"checkpoints {checkpoint_steps(run_dir)}"


def sharded(run_dir: Path, fsdp: FsdpOptions) -> FsdpTrainer:
    model, loss = run_dir.with_name("from"), Objective()
    return FsdpTrainer(model, choose("cpu", 0), TrainOptions(), loss, fsdp=fsdp, temperature=1.0)


async def saves_shards(run_dir: Path) -> str:
    return await saves(run_dir, sharded(run_dir, FsdpOptions()))


async def trains(run_dir: Path, gap_s: float = 0.0) -> str:
    """A step in lock step whose samples reach the second rank later than the first."""
    ranks, engine = RankCollectives(), sharded(run_dir, LOCK_STEP)
    config = RunConfig(run_dir=str(run_dir), trainer=TrainerConfig(engine="fsdp", ranks=2, fsdp=LOCK_STEP))
    session: Any = StubSession(gap_s if dist.get_rank() == 1 else 0.0)
    rank = trainer.Trainer(session, config, engine, ranks)
    await rank.train_step(0)
    metrics = await rank.collective_call(engine.step, "step 0")
    return f"{metrics['response_length']:.0f} tokens"


async def waits(_: Path) -> str:
    """A call that one rank makes late; returns the workers that this rank waited for, and the seconds."""
    timeline = Timeline(MonotonicClock())
    ranks = RankCollectives(timeline, f"trainer-{dist.get_rank()}")
    await ranks.call(dist.barrier, "the names of all ranks")
    timeline.drain()
    with ranks.exempt():
        await asyncio.to_thread(trainer.to_training_batch, *[None] * 4)  # type: ignore[arg-type]
    with timeline.busy("step"):
        await ranks.call(dist.barrier, "step 0")
    spans = [interval for interval in timeline.drain() if interval.kind == RANKS]
    return f"{'+'.join({span.root for span in spans})} {sum(span.end_s - span.start_s for span in spans):.2f}"


async def exports(run_dir: Path) -> str:
    ranks, engine = RankCollectives(), sharded(run_dir, FsdpOptions())
    await ranks.call(lambda: engine.export(run_dir / "final"), "the final model")
    return "exported"


def sample(*_: object) -> TrainingBatch:
    """Of 3 tokens on the first rank, of 5 on the second."""
    tokens = torch.tensor([2, 3, 4, 5, 6][: 3 + 2 * dist.get_rank()])
    logprobs = torch.full((len(tokens),), -3.5)
    return TrainingBatch(
        prompts=[tokens],
        responses=[tokens],
        rollout_logprobs=[logprobs],
        reference_logprobs=None,
        advantages_N=torch.ones(1),
        weights_N=torch.ones(1),
        groups_N=torch.zeros(1, dtype=torch.int64),
    )


Case = tuple[int, Any, str, Callable[..., Any], Callable[[Path], Awaitable[str]]]
CASES: dict[str, Case] = {
    "keeping the model": (0, checkpoints, "keep_model", slowly(checkpoints.keep_model), saves),
    "writing the state": (0, torch_trainer, "write_tensors", slowly(write_tensors), saves),
    "writing shards": (0, StorageWriter, "write_data", slowly(StorageWriter.write_data), saves_shards),
    "reading shards": (0, StorageReader, "read_data", slowly(StorageReader.read_data), saves_shards),
    "completing": (0, checkpoints, "write_checksums", slowly(write_checksums), saves),
    "removing": (0, checkpoints, "checkpoint_steps", slowly(checkpoint_steps), saves),
    "stopped while saving": (0, checkpoints, "keep_model", stopping, saves),
    "stopped while writing shards": (0, StorageWriter, "write_data", stopping, saves_shards),
    "reading the model": (0, sharding, "load_model", slowly(load_model), trains),
    "waiting for samples": (0, trainer, "to_training_batch", sample, lambda at: trains(at, 2 * RANKS_S)),
    "hanging in lock step": (1, trainer, "to_training_batch", hanging, trains),
    "late for a call": (1, trainer, "to_training_batch", slowly(sample), waits),
    "exporting": (0, fsdp_trainer, "write_weights", slowly(write_weights), exports),
}
"""By name: the slow rank, the owner and name of the replaced function, its replacement, and the work of both."""


async def run_rank(case: str, run_dir: Path, rank: int) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", STORE_VARIABLE: str(run_dir / "store")}
    init_ranks(choose("cpu", 0), RANKS_S)
    trainer.to_training_batch = sample  # type: ignore[assignment]
    slow, owner, name, replacement, work = CASES[case]
    if rank == slow:
        setattr(owner, name, replacement)
    begin_s = time.monotonic()
    try:
        result = await work(run_dir)
    except WaitExpired as expired:
        result = str(expired)
    # In one write: other processes write there too.
    os.write(sys.stdout.fileno(), json.dumps([case, rank, result, time.monotonic() - begin_s]).encode() + b"\n")
    os._exit(0)


def fork(case: str, run_dir: Path, rank: int) -> int:
    pid = os.fork()
    if pid == 0:
        die_with_parent()
        asyncio.run(run_rank(case, run_dir, rank))
    return pid


def main(directory: Path, cases: list[str]) -> None:
    tokenizer = wrap_tokenizer(Arithmetic(0, 0).tokenizer())
    model = build_model(vocab_size=32, hidden_size=16, layers=1, heads=2, intermediate_size=16, max_length=16, seed=3)
    model.save_pretrained(directory / "from")
    tokenizer.save_pretrained(directory / "from")
    pids = []
    for number, case in enumerate(cases):
        run_dir = directory / f"run-{number}"
        run_dir.mkdir()
        pids.append([fork(case, run_dir, rank) for rank in range(2)])
    for case, pair in zip(cases, pids, strict=True):
        faulty = CASES[case][3] in (stopping, hanging)
        slow = CASES[case][0]
        os.waitpid(pair[1 - slow], 0)
        if faulty:
            os.kill(pair[slow], signal.SIGKILL)
        os.waitpid(pair[slow], 0)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), sys.argv[2:] or list(CASES))
