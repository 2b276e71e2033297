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

from collections.abc import Awaitable, Callable, Mapping, Sequence

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
    """Run all engines until ``steps`` updates are done. A task gets a sample as soon as the columns it needs exist.

    Args:
        columns: the columns of prompts and samples.
        tasks: the stages; each pulls and writes columns under its name.
        engines: the coroutine function of each engine, by name.
        update: name of the task that trains, and of its engine. It takes whole groups; the run ends when it returns.
        steps: number of updates.
        prompts_per_step: groups per update.
        staleness: largest difference of the version being trained and the oldest that generated a token, in versions.
        micro_batch_tokens: tokens in one batch of the update, over all tensor columns of samples.

    Raises:
        ConfigError: if no engine is named ``update``.
        BaseException: the error of the first engine that fails.
    """
    if update not in engines:
        raise ConfigError(f"no engine is named {update!r} like the task that trains; there are {', '.join(engines)}")
    tokens = tuple(column.name for column in columns if column.scope == "slot")
    flow = api.Dataflow(tuple(columns), tuple(tasks), update, PROMPTS, token_columns=tokens)
    settings = api.Settings(steps=steps, groups_per_step=prompts_per_step, completing_roles=(update,), model=ACTOR)
    policies = api.Policies(
        api.StrictLag(staleness), api.Fifo(), api.TokenBudget(micro_batch_tokens), api.DelayedUpdate()
    )
    await api.run_roles(flow, settings, policies, {name: _role(engine) for name, engine in engines.items()})


def _role(engine: Engine) -> api.Role:
    async def role(session: api.Session) -> None:
        await engine(Service(session))
        session.finished()

    return role


class Service:
    """The calls of one engine."""

    def __init__(self, session: api.Session) -> None:
        self.session = session
        self._offered = 0
        self._updates = 0
        self._version: int | None = None

    async def put_prompts_data(self, columns: Mapping[str, Sequence[torch.Tensor]], samples: int) -> bool:
        """Put prompts into the queue, each for ``samples`` responses.

        Returns True when they fit into the staleness bound, False if the run needs no more prompts.
        """
        count = len(next(iter(columns.values())))
        prompts = range(self._offered, self._offered + count)
        self._offered += count
        return await self.session.offer_many(PROMPTS, prompts, 0, samples, columns) is not None

    async def get_experience_data(
        self, task: str, count: int = 0, weights: Mapping[str, torch.Tensor] | None = None
    ) -> api.Batch:
        """Wait for samples that are ready for the task. Each sample is given to one engine.

        Args:
            task: name of the task.
            count: largest number of samples; 0 for the update, whose batches have ``micro_batch_tokens``.
            weights: for a task that generates: tensors into which new versions are copied while it waits.

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
        """Write the task's columns for the samples of a batch: for each column, 1-D tensors or numbers."""
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
            spans = [(self._version, len(row)) for row in next(iter(tensors.values()))]
        await self.session.commit(task, batch.slots, batch.leases, tensors, numbers, spans=spans)

    async def weight_sync_notify(
        self, weights: Mapping[str, torch.Tensor], metrics: Mapping[str, float] | None = None
    ) -> None:
        """Complete an update and publish the weights after it. Engines that generate fetch them during their work."""
        self.session.step_done(self._updates, metrics or {})
        self._updates += 1
        await self.session.params.publish(ACTOR, api.Snapshot.take(self._updates, weights))
