"""Records of stored samples that workers send to the controller.

A reward worker sends texts and rewards, a trainer advantages and log-probabilities, a rollout worker generation times.
All choose the same groups, by a hash. The controller accepts what the rate of the run allows; no worker waits for it.
"""

from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from time import monotonic

import torch
from torch import Tensor

from flowrt.client.sample_tensors import Batch
from flowrt.client.session import Session
from flowrt.engines.base import Capture
from flowrt.engines.stopping import StopConditions
from flowrt.protocol.sample_records import (
    MAX_REASON_CHARS,
    GeneratedSample,
    GroupChoice,
    ScoredSample,
    TrainedSample,
    encode_record,
    messages,
    pack_text,
)
from flowrt.recipes.config import RunConfig
from flowrt.recipes.eval_names import evaluated_sets, first_number_of
from flowrt.recipes.grpo import EVAL, TRAIN
from flowrt.rewards.scoring import REWARD

MAX_SINGLES = 8
"""Maximum number of truncated samples that a worker sends for one version of the weights, of groups not chosen."""
MAX_PROMPTS = 64
"""Number of prompts whose text is kept for further samples of their group."""


def group_choice(config: RunConfig) -> GroupChoice | None:
    """The choice of the groups of a run that are stored; None if no group is.

    On average ``samples.per_step`` samples per step are chosen.
    """
    if not config.samples.per_step:
        return None
    share = config.samples.per_step / (config.prompts_per_step * config.group_size)
    return GroupChoice(seed=config.seed, share=share)


@dataclass(frozen=True, slots=True)
class Score:
    """The reward of a row of a batch; ``seconds`` is the duration of scoring it, ``text`` the response if decoded."""

    reward: float
    numbers: Mapping[str, float]
    """Columns of reward functions, see `flowrt.rewards.scoring.reward_columns`."""
    reason: str
    """How scoring failed, as "RESULT: sentence"; empty if it did not fail."""
    seconds: float
    text: str | None = None


class ScoredSamples:
    """Sends the texts and rewards of stored samples."""

    def __init__(self, session: Session, config: RunConfig, stop: StopConditions) -> None:
        self._session = session
        self._stop = stop
        self._is_chosen = group_choice(config)
        self._eval_names = evaluated_sets(config)
        self._prompts: OrderedDict[tuple[int, int], bytes] = OrderedDict()
        self._singles_of, self._singles = -1, 0

    def send(self, batch: Batch, scores: Mapping[int, Score], refused: Collection[int] = ()) -> None:
        """Send the records of those scored rows of a batch that are stored.

        ``scores`` is by row; the rewards of the slots in ``refused`` were not accepted.
        """
        if self._is_chosen is None:
            return
        records = []
        for row, score in scores.items():
            if batch.slots[row] not in refused and (is_single := self._why(batch, row, score)) is not None:
                records.append(encode_record(self._record(batch, row, score, is_single)))
        _send(self._session, records)

    def _why(self, batch: Batch, row: int, score: Score) -> bool | None:
        """True if a sample is stored by itself, False if it is stored with its group, None if it is not stored."""
        grant = batch.grant
        is_chosen = self._is_chosen
        if is_chosen is None:
            return None
        if batch.flows[row] == EVAL or is_chosen(grant.epochs[row], grant.prompts[row]):
            return False
        if score.reason:
            return True
        if not batch.inline["truncated"][row]:
            return None
        newest = max(grant.spans[row][::2], default=0)
        if newest > self._singles_of:
            self._singles_of, self._singles = newest, 0
        self._singles += 1
        return True if self._singles <= MAX_SINGLES else None

    def _record(self, batch: Batch, row: int, score: Score, is_single: bool) -> ScoredSample:
        grant = batch.grant
        response = batch.tensors["response"][row]
        is_eval = batch.flows[row] == EVAL
        number = grant.prompts[row]
        return ScoredSample(
            flow=EVAL if is_eval else TRAIN,
            eval_name=self._eval_names.get(first_number_of(number), "") if is_eval else "",
            epoch=grant.epochs[row],
            prompt=number,
            member=grant.members[row],
            attempt=grant.attempts[row],
            reward=score.reward,
            parts=tuple(_parts(score.numbers)),
            finish=finish_reason(self._stop, response[-1:].tolist(), bool(batch.inline["truncated"][row])),
            reason=score.reason.encode(errors="replace").decode()[:MAX_REASON_CHARS],
            is_single=is_single,
            spans=grant.spans[row],
            reward_s=score.seconds,
            data=(
                self._prompt_text(batch, row),
                pack_text(self._stop.text(response.tolist()) if score.text is None else score.text),
                response.to(torch.int32).numpy().tobytes(),
            ),
        )

    def _prompt_text(self, batch: Batch, row: int) -> bytes:
        key = (batch.grant.epochs[row], batch.grant.prompts[row])
        if (known := self._prompts.get(key)) is not None:
            return known
        tokens = batch.tensors["prompt"][row].tolist()
        text = pack_text(str(self._stop.tokenizer.decode(tokens, skip_special_tokens=False)))
        self._prompts[key] = text
        if len(self._prompts) > MAX_PROMPTS:
            self._prompts.popitem(last=False)
        return text


def finish_reason(stop: StopConditions, last: Sequence[int], is_truncated: bool) -> str:
    """How a response ended. ``last``: its last token, if it has any."""
    if is_truncated:
        return "length"
    return "stop" if not last or last[0] in stop.token_ids or not stop.strings else "stop_string"


def _parts(numbers: Mapping[str, float]) -> Iterable[tuple[str, float]]:
    """(name, value) of the reward functions that apply and of their parts."""
    for name, value in numbers.items():
        table, _, of = name.partition("/")
        if table == REWARD and numbers.get(f"applies/{of.partition('/')[0]}", 1.0):
            yield of, value


@dataclass(frozen=True, slots=True)
class _Started:
    slot: int
    epoch: int
    prompt: int
    member: int
    attempt: int
    at_s: float
    seconds: float = 0.0
    """Duration of the generation; 0 until it has finished."""


class GeneratedSamples:
    """Sends the generation times of stored samples."""

    def __init__(self, session: Session, config: RunConfig) -> None:
        self._session = session
        self._is_chosen = group_choice(config)
        self._running: dict[int, _Started] = {}

    def started(self, key: int, batch: Batch, row: int) -> None:
        """Note that the engine starts a row of a batch, under this key."""
        grant = batch.grant
        epoch, prompt = grant.epochs[row], grant.prompts[row]
        if self._is_chosen is not None and batch.flows[row] != EVAL and self._is_chosen(epoch, prompt):
            self._running[key] = _Started(
                batch.slots[row], epoch, prompt, grant.members[row], grant.attempts[row], monotonic()
            )

    def finished(self, keys: Iterable[int]) -> None:
        """Note that the engine has returned these sequences."""
        now = monotonic()
        for key in keys:
            if (sample := self._running.get(key)) is not None:
                self._running[key] = replace(sample, seconds=now - sample.at_s)

    def send(self, keys: Iterable[int], refused: Collection[int]) -> None:
        """Send the generation times of finished sequences, without those of the slots in ``refused``."""
        records = [
            encode_record(GeneratedSample(sample.epoch, sample.prompt, sample.member, sample.attempt, sample.seconds))
            for key in keys
            if (sample := self._running.pop(key, None)) is not None and sample.slot not in refused
        ]
        _send(self._session, records)


@dataclass(slots=True)
class _Trained:
    epoch: int
    prompt: int
    member: int
    attempt: int
    logprobs_T: Tensor
    capture: Capture


class TrainedSamples:
    """Sends advantages and log-probabilities of the stored samples that a rank trains in a step."""

    def __init__(self, session: Session, config: RunConfig) -> None:
        self._session = session
        self._is_chosen = group_choice(config)
        self._samples: list[_Trained] = []

    def captures(self, batch: Batch, advantages_N: Tensor) -> list[Capture | None]:
        """Objects in which an engine notes its log-probabilities, one per row; None for a row that is not stored.

        ``advantages_N`` ([N]) has the advantage of each row.
        """
        is_chosen = self._is_chosen
        captures: list[Capture | None] = [None] * len(batch)
        if is_chosen is None:
            return captures
        grant = batch.grant
        for row in range(len(batch)):
            if is_chosen(grant.epochs[row], grant.prompts[row]):
                capture = captures[row] = Capture(float(advantages_N[row]))
                key = grant.epochs[row], grant.prompts[row], grant.members[row], grant.attempts[row]
                self._samples.append(_Trained(*key, batch.tensors["logprobs"][row], capture))
        return captures

    def send(self, step: int) -> None:
        """Send the records of a complete step."""
        samples, self._samples = self._samples, []
        _send(self._session, [encode_record(_trained(sample, step)) for sample in samples])

    def clear(self) -> None:
        """Forget the samples of a step that is discarded."""
        self._samples.clear()


def _trained(sample: _Trained, step: int) -> TrainedSample:
    trainer_T = sample.capture.logprobs_T
    return TrainedSample(
        step=step,
        epoch=sample.epoch,
        prompt=sample.prompt,
        member=sample.member,
        attempt=sample.attempt,
        advantage=sample.capture.advantage,
        data=(_half(sample.logprobs_T), b"" if trainer_T is None else _half(trainer_T)),
    )


def _half(values_T: Tensor) -> bytes:
    return bytes(values_T.detach().to("cpu", torch.float16).numpy().tobytes())


def _send(session: Session, records: Iterable[bytes | None]) -> None:
    for message in messages(record for record in records if record is not None):
        session.send(message)
