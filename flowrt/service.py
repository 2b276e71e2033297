"""AsyncFlow's service calls (arXiv 2507.01663, section 5) for those who come from it: thin names over `flowrt.api`.

| AsyncFlow | here |
|---|---|
| `init_engines` | `api.run_roles`: a controller, and each engine with a session of its own |
| `put_prompts_data` | `Session.offer_many` |
| `get_experience_data` | `Session.pull`; `api.pull_between` for an engine that generates |
| `put_experience_data` | `Session.commit` |
| `weight_sync_notify` | `Session.step_done` and `Params.publish` of a `Snapshot` |

Whoever needs more than these five has the session itself at hand: `Service.session`.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence

import torch

from flowrt import api
from flowrt.errors import ConfigError

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
    """Run every engine until ``steps`` updates are done. Tasks move forward as the columns that they need appear.

    ``update`` names the task that trains, and its engine, with which the run ends; it takes whole groups, in
    micro-batches of so many tokens (of all tensor columns that belong to samples). Raises what the first engine that
    failed raised, ConfigError when none has the name of the update.
    """
    if update not in engines:
        raise ConfigError(f"no engine is named {update!r}, as the task that trains is; there are {', '.join(engines)}")
    tokens = tuple(column.name for column in columns if column.scope == "slot")
    flow = api.Dataflow(tuple(columns), tuple(tasks), update, PROMPTS, token_columns=tokens)
    settings = api.Settings(steps, prompts_per_step, finishers=(update,), model=ACTOR)
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
    """What one engine says to the others."""

    def __init__(self, session: api.Session) -> None:
        self.session = session
        self._offered = 0
        self._updates = 0
        self._version: int | None = None

    async def put_prompts_data(self, columns: Mapping[str, Sequence[torch.Tensor]], samples: int) -> bool:
        """Put prompts into the queue, each to be answered ``samples`` times; False when the run needs no more.

        Returns when there is room for them within the staleness bound.
        """
        count = len(next(iter(columns.values())))
        prompts = range(self._offered, self._offered + count)
        self._offered += count
        return await self.session.offer_many(PROMPTS, prompts, 0, samples, columns) is not None

    async def get_experience_data(
        self, task: str, count: int = 0, weights: Mapping[str, torch.Tensor] | None = None
    ) -> api.Batch:
        """Up to ``count`` samples that are ready for the task, each for one engine only; waits until there are some.

        With ``weights``, for a task that generates: new versions are copied into these tensors while it waits. For the
        update, a batch that is `closed` says that the step has all its samples.
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
        """Write the task's columns for the samples of a batch: lists of 1-D tensors, or of numbers."""
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
        """An update is done, and these are the weights after it: engines that generate fetch them beside their work."""
        self.session.step_done(self._updates, metrics or {})
        self._updates += 1
        await self.session.params.publish(ACTOR, api.Snapshot.take(self._updates, weights))
