"""The service calls of AsyncFlow (arXiv 2507.01663, section 5), as thin functions over `flowrt.api`.

| AsyncFlow | here |
|---|---|
| `init_engines` | `api.run_roles`: a controller, and each engine with a session of its own |
| `put_prompts_data` | `Session.offer_many` |
| `get_experience_data` | `Session.pull`; `api.pull_between` for an engine that generates |
| `put_experience_data` | `Session.commit` |
| `weight_sync_notify` | `Session.step_done` and `WeightTransfers.publish` of a `Snapshot` |

For anything beyond these five calls use the session: `Service.session`.
"""

import itertools
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence

import torch

from flowrt import api
from flowrt.errors import ConfigError

__all__ = ["ACTOR", "PROMPTS", "Column", "Columns", "Engine", "Service", "Stage", "init_engines"]

Engine = Callable[["Service"], Awaitable[None]]
Columns = Mapping[str, Sequence[torch.Tensor] | Sequence[float]]
PROMPTS = "prompts"
ACTOR = "actor"

Column, Stage = api.Column, api.Stage


async def init_engines(
    columns: Sequence[api.Column],
    tasks: Sequence[api.Stage],
    engines: Mapping[str, Engine],
    *,
    update: str,
    steps: int,
    prompts_per_step: int,
    staleness: int = 1,
    micro_batch_tokens: int = 2048,
) -> None:
    """Run all engines until ``steps`` updates are done. A sample is ready for a task when its needed columns exist.

    Args:
        columns: the columns of prompts and samples.
        tasks: the stages; their engines pull and commit under the names of the stages.
        engines: the coroutine function of each engine, by name.
        update: name of the task that trains, and of its engine. The task has to take whole groups; the run ends when
            the engine returns.
        steps: number of updates.
        prompts_per_step: groups per update.
        staleness: largest difference between the version being trained and the oldest version that generated a token.
        micro_batch_tokens: tokens in one batch of the update, over all tensor columns of samples.

    Raises:
        ConfigError: if no engine is named ``update``.
        Stopped, Exception: as `flowrt.api.run_roles`.
    """
    if update not in engines:
        raise ConfigError(f"no engine is named {update!r} like the task that trains; there are {', '.join(engines)}")
    tokens = tuple(column.name for column in columns if column.scope == "slot")
    flow = api.Dataflow(tuple(columns), tuple(tasks), update, PROMPTS, token_columns=tokens)
    settings = api.Settings(steps=steps, groups_per_step=prompts_per_step, completing_roles=(update,), model=ACTOR)
    policies = api.Policies(
        api.StrictLag(staleness), api.Fifo(), api.TokenBudget(micro_batch_tokens), api.DelayedUpdate()
    )
    prompts = itertools.count()
    await api.run_roles(flow, settings, policies, {name: _role(engine, prompts) for name, engine in engines.items()})


def _role(engine: Engine, prompts: Iterator[int]) -> api.Role:
    async def role(session: api.Session) -> None:
        await engine(Service(session, prompts))
        session.finished()

    return role


class Service:
    """The service calls of one engine; ``session`` is the engine's session.

    ``prompts`` numbers the prompts of all engines: each is offered once, whichever engine puts it.
    """

    def __init__(self, session: api.Session, prompts: Iterator[int]) -> None:
        self.session = session
        self._prompts = prompts
        self._updates = 0
        self._version: int | None = None

    async def put_prompts_data(self, columns: Mapping[str, Sequence[torch.Tensor]], samples: int) -> bool:
        """Put prompts into the queue; returns when the staleness bound admits all of them.

        Args:
            columns: group columns, each with one 1-D tensor per prompt.
            samples: number of responses to each prompt.

        Returns:
            True when the prompts are admitted, False if the run needs no more prompts.
        """
        prompts = list(itertools.islice(self._prompts, len(next(iter(columns.values())))))
        return await self.session.offer_many(PROMPTS, prompts, 0, samples, columns) is not None

    async def get_experience_data(
        self, task: str, count: int = 0, weights: Mapping[str, torch.Tensor] | None = None
    ) -> api.Batch:
        """Wait for samples that are ready for the task. Each sample is leased to one engine. Raises as `Session.pull`.

        Args:
            task: name of the task.
            count: largest number of samples; 0 for the update, whose batches have ``micro_batch_tokens``.
            weights: for a task that generates: its weights by name; new versions are copied into them while it waits.

        Returns:
            The samples. For the update, ``closed`` is true when the step has all its samples.
        """
        if weights is None:
            return await self.session.pull(task, count, step=self._updates)
        if self._version is None:
            self._version = 0
            self.session.params.applied(ACTOR, 0)

        def swap(snapshot: api.Snapshot) -> None:
            snapshot.restore(weights)
            self._version = snapshot.version

        return await api.pull_between(self.session, task, count, swap)

    async def put_experience_data(self, task: str, batch: api.Batch, columns: Columns) -> None:
        """Write the task's columns for the samples of a batch. Raises as `Session.commit`.

        Args:
            task: name of the task.
            batch: as returned by `get_experience_data`.
            columns: for each column, one 1-D tensor or one number per sample. For a task that generates, the first
                tensor column has one entry per generated token.
        """
        tensors: dict[str, Sequence[torch.Tensor]] = {}
        numbers: dict[str, Sequence[float]] = {}
        for name, rows in columns.items():
            given = [row for row in rows if isinstance(row, torch.Tensor)]
            if given:
                tensors[name] = given
            else:
                numbers[name] = [float(row) for row in rows]
        spans: list[tuple[int, ...]] = []
        if self._version is not None:
            if not tensors:
                raise ConfigError(f"task {task} generates, and none of its columns is a tensor; give one of the tokens")
            spans = [(self._version, len(row)) for row in next(iter(tensors.values()))]
        await self.session.commit(task, batch.slots, batch.leases, tensors, numbers, spans=spans)

    async def weight_sync_notify(
        self, weights: Mapping[str, torch.Tensor], metrics: Mapping[str, float] | None = None
    ) -> None:
        """Complete an update and publish its weights, which generating engines fetch while they work.

        Args:
            weights: all weights after the update, by name; they are copied.
            metrics: metrics of the update for metrics.jsonl, by name.
        """
        self.session.step_done(self._updates, metrics or {})
        self._updates += 1
        await self.session.params.publish(ACTOR, api.Snapshot.take(self._updates, weights))
