"""A user's reward function, and how it is called.

| its parameters | is called with | returns |
|---|---|---|
| ``completions`` and none for a single response | lists, one value a sample, as the functions of TRL | a list |
| ``group`` as the first one | all samples of a prompt, as `GroupSample` | a list |
| any others | one sample, see `flowrt.rewards.user_file.Arguments` | a number, named numbers, or None |

Each may be ``async``.
"""

import asyncio
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from inspect import Parameter
from types import SimpleNamespace
from typing import Any

from flowrt.rewards.call_forms import FACTS, CallForm, Form, RewardSample
from flowrt.rewards.outcomes import Result, RewardOutcome
from flowrt.rewards.rows import decode_row
from flowrt.rewards.user_file import (
    ANSWER,
    CALLED_AS,
    LOG,
    MISSING,
    RESPONSE,
    Arguments,
    MissingColumn,
    load,
    no_column,
    note,
    outcome_of,
    shown,
)
from flowrt.runtime.user_module import Unusable, cut, defined_at

BATCH, GROUP, TOKENIZER = "completions", "group", "tokenizer"
LOG_METRIC, IGNORED = "log_metric", "log_extra"
"""Arguments of TRL: `LOG` under another name, and one that logs columns of a table, which does nothing here."""


@dataclass(frozen=True, slots=True)
class GroupSample:
    """A sample of the group that a group function is called with."""

    response: str
    turn: str
    """The whole turn: the response with the prefix, and with what `reward.after` leaves out."""
    prefix: str
    truncated: bool
    finish_reason: str
    completion_ids: Sequence[int]


class UserReward:
    """A loaded reward function; ``form`` says how it is called."""

    def __init__(self, argument: str, index: int, tokenizer: Callable[[], object]) -> None:
        """Load the function, see `load`; ``tokenizer`` returns the run's. Raises Unusable if it cannot be called."""
        function = argument.rpartition(":")[2]
        loaded = load(argument, index)
        self._function: Callable[..., Any] = loaded
        self._line = defined_at(loaded)
        try:
            self._arguments = Arguments(loaded)
        except TypeError as error:
            raise Unusable(f"{function} cannot be called as {CALLED_AS}: {error}", self._line) from None
        self._parameters = self._arguments.parameters
        names = [parameter.name for parameter in self._parameters]
        takes_any = any(parameter.kind is Parameter.VAR_KEYWORD for parameter in self._parameters)
        form: Form = "sample"
        if BATCH in names and not {*RESPONSE} & {*names}:
            form = "batch"
        elif names[0] == GROUP:
            form = "group"
        if form != "sample" and any(parameter.kind is Parameter.POSITIONAL_ONLY for parameter in self._parameters):
            what = f"{function} has a positional-only parameter, and is called by name; leave the / out"
            raise Unusable(what, self._line)
        facts = [name for name in FACTS if name in names]
        if form == "group":
            facts = list(FACTS)
        elif form == "batch" and takes_any:
            facts = list(dict.fromkeys([*facts, "step", "completion_ids"]))
        elif form == "batch" and "trainer_state" in names:
            facts = list(dict.fromkeys([*facts, "step"]))
        is_async = any(map(inspect.iscoroutinefunction, (loaded, getattr(type(loaded), "__call__", None))))  # noqa: B004
        self.form = CallForm(form, is_async, tuple(facts))
        self._takes_any = takes_any
        self._tokenizer = tokenizer() if TOKENIZER in names else None
        self._loop: asyncio.AbstractEventLoop | None = None

    def __call__(self, samples: Sequence[RewardSample]) -> list[RewardOutcome]:
        """Call the function. Raises any exception of it, and Unusable for a parameter that is not a column."""
        logged: list[dict[str, float]] = [{} for _ in samples]
        value = self._begin(samples, logged)
        if inspect.iscoroutine(value):
            self._loop = self._loop or asyncio.new_event_loop()
            value = self._loop.run_until_complete(value)
        return self._outcomes(value, logged)

    async def call_async(self, samples: Sequence[RewardSample]) -> list[RewardOutcome]:
        """Call an async function; otherwise as `__call__`."""
        logged: list[dict[str, float]] = [{} for _ in samples]
        return self._outcomes(await self._begin(samples, logged), logged)

    def _begin(self, samples: Sequence[RewardSample], logged: Sequence[dict[str, float]]) -> Any:
        rows = [decode_row(sample.row) for sample in samples]
        try:
            if self.form.form == "sample":
                columns = rows[0]
                facts = {**samples[0].facts, LOG: partial(note, logged[0]), TOKENIZER: self._tokenizer}
                answer = columns.pop(ANSWER, MISSING)
                positional, named = self._arguments.of(samples[0].response, answer, columns, facts)
                return self._function(*positional, **named)
            known = self._of_batch(samples, rows) if self.form.form == "batch" else self._of_group(samples, rows)
            log = partial(note_all, logged)
            known = {LOG: log, LOG_METRIC: log, IGNORED: _ignore, TOKENIZER: self._tokenizer} | known
            return self._function(**self._named(known))
        except MissingColumn as missing:
            row = next((row for row in rows if str(missing) not in row), rows[0])
            what = f"it takes {str(missing)!r}, and {no_column(str(missing), row)}"
            raise Unusable(what, self._line) from None

    def _of_batch(self, samples: Sequence[RewardSample], rows: Sequence[Mapping[str, object]]) -> dict[str, object]:
        """The arguments of a batch function: a column that some rows lack has None for them.

        Raises MissingColumn for a parameter without a default that is a column of some rows.
        """
        facts = {name: [sample.facts.get(name) for sample in samples] for name in self.form.facts}
        step = _last_step(samples)
        names = dict.fromkeys(name for row in rows for name in row)
        lacked = {name for name in names if not all(name in row for row in rows)}
        offered = {*facts, "step", LOG, LOG_METRIC, IGNORED, TOKENIZER, "trainer_state", "prompts", BATCH}
        columns = {name: [row.get(name) for row in rows] for name in names if name not in lacked & offered}
        for parameter in self._parameters:
            if (
                parameter.name in lacked - offered
                and parameter.default is Parameter.empty
                and parameter.kind is not parameter.VAR_KEYWORD
            ):
                raise MissingColumn(parameter.name)
        return {
            **facts,
            **columns,
            "step": columns.get("step", step),
            "trainer_state": SimpleNamespace(global_step=step),
            "prompts": [row.get("prompt") for row in rows],
            BATCH: [_completion(sample.response, row) for sample, row in zip(samples, rows, strict=True)],
        }

    def _of_group(self, samples: Sequence[RewardSample], rows: Sequence[Mapping[str, object]]) -> dict[str, object]:
        """The arguments of a group function: the samples, and the columns of their row."""
        group = [
            GroupSample(
                sample.response,
                str(sample.facts.get("turn", sample.response)),
                str(sample.facts.get("prefix", "")),
                bool(sample.facts.get("truncated")),
                str(sample.facts.get("finish_reason", "stop")),
                sample.facts.get("completion_ids", ()),  # type: ignore[arg-type]
            )
            for sample in samples
        ]
        return {"step": _last_step(samples), **rows[0], GROUP: group}

    def _named(self, known: Mapping[str, object]) -> dict[str, object]:
        """The arguments by the names of the parameters. Raises MissingColumn."""
        named = {}
        for parameter in self._parameters:
            if parameter.kind in (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD):
                continue
            if parameter.name in known:
                named[parameter.name] = known[parameter.name]
            elif parameter.default is Parameter.empty:
                raise MissingColumn(parameter.name)
        rest = known if self._takes_any else {}
        return {name: value for name, value in rest.items() if name not in self._arguments.bound} | named

    def _outcomes(self, value: object, logged: Sequence[Mapping[str, float]]) -> list[RewardOutcome]:
        """The outcome of each sample of a call that returned ``value``."""
        if self.form.form == "sample":
            return [outcome_of(value, self._line, logged[0])]
        if value is None:
            return [outcome_of(None, self._line, of_sample) for of_sample in logged]
        values = value.tolist() if hasattr(value, "tolist") else value
        if not isinstance(values, list | tuple) or len(values) != len(logged):
            size = f" of {len(values)}" if isinstance(values, list | tuple) else ""
            kind = f"{type(value).__name__}{size}"
            detail = f"it returned {shown(value)} ({kind}), not a list of {len(logged)} rewards"
            return [RewardOutcome(Result.INVALID, detail=detail, line=self._line) for _ in logged]
        return [outcome_of(value_of_sample, self._line, of) for value_of_sample, of in zip(values, logged, strict=True)]


def note_all(logged: Sequence[dict[str, float]], name: str, value: object) -> None:
    """Log a number for all samples of a call, or a list of numbers, one a sample. Raises Unusable for anything else."""
    values = value.tolist() if hasattr(value, "tolist") else value
    if isinstance(values, list | tuple):
        if len(values) != len(logged):
            raise Unusable(f"it logged {len(values)} numbers as {cut(repr(name))} for {len(logged)} samples")
        for value_of_sample, of in zip(values, logged, strict=True):
            if value_of_sample is not None:
                note(of, name, value_of_sample)
        return
    for of in logged:
        note(of, name, values)


def _ignore(*arguments: object, **named: object) -> None:
    """Does nothing."""


def _last_step(samples: Sequence[RewardSample]) -> int:
    return max(int(step) if isinstance(step := sample.facts.get("step", 0), int) else 0 for sample in samples)


def _completion(response: str, row: Mapping[str, object]) -> object:
    """A response as TRL gives it: text, or the messages of the turn if the prompt is messages."""
    return [{"role": "assistant", "content": response}] if isinstance(row.get("prompt"), list) else response
