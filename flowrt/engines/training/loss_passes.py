"""Forward passes with the terms of an algorithm, and the metrics of a step's passes.

A pass returns the *sum* of its losses; only the step divides, by the global count of all passes of all ranks (tokens,
samples or groups, as the algorithm's terms say). So the gradient does not depend on how the step was split.

A sample whose recorded log-probabilities cannot be those of its tokens (not finite, above 0, or of probability 0), or
do not match its response in number, is masked: its loss is 0, its tokens still count, ``invalid_samples`` counts it.
Comparisons of rollout and trainer leave its tokens out.
"""

import logging
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from flowrt.algorithms.algorithm import Adaptive, Algorithm, Count, StepTokens, Term, Tokens
from flowrt.algorithms.losses import clamped_log_ratio_T
from flowrt.algorithms.support import Support, singletons
from flowrt.engines.base import Capture, TrainingBatch
from flowrt.engines.training.forward import cut_into_passes, response_predictions
from flowrt.errors import ConfigError

if TYPE_CHECKING:
    from flowrt.engines.training.deferred import DeferredPass

log = logging.getLogger("flowrt")
COUNTS = ("batches", "tokens", "samples", "groups", "invalid_samples", "valid_tokens")
MEANS = ("nll",)
"""Summed over the passes and ranks of a step, and reported as means per token."""
MISMATCHES = ("mismatch_kl_k1", "mismatch_kl_k3")
"""As `MEANS`, per token of samples with usable log-probabilities."""
RATIOS = ("policy_over_rollout", "squared_policy_over_rollout")
"""Sums of the tokens' probability ratios and of their squares, for the effective sample fraction."""
EFFECTIVE_FRACTION = "effective_sample_fraction"
DENOMINATORS: dict[Count, str] = {"token": "tokens", "sample": "samples", "group": "groups"}
DIVERGENCE = "divergence_"
AGES = 8
"""Staleness values (versions) with a divergence metric of their own; the last one includes all staler tokens."""
K3_OF_AGE = [f"k3_of_age_{age}" for age in range(AGES)]
TOKENS_OF_AGE = [f"tokens_of_age_{age}" for age in range(AGES)]
MIN_LOGPROB = -87.0
"""Lower bound (nats) of a usable log-probability; below it the probability is 0 in float32 and cannot be sampled."""
MAX_LOGPROB = 1e-2
"""Upper bound (nats) of a usable log-probability; above it the number is not 0 with a rounding error."""


Recorded = tuple[Tensor, Tensor | None]
"""Log-probabilities of a sample under the rollout policy and the reference."""


class _Predicted(NamedTuple):
    logprobs_T: Tensor
    entropy_T: Tensor | None
    sample_T: Tensor


class _Ratios(NamedTuple):
    """What the divergence of a pass is computed from: log-ratios on the device, the rest on the host."""

    ratio_T: Tensor
    valid_T: Tensor
    ages_T: Tensor


class LossPasses:
    """Computes the loss of one pass at a time, and accumulates the metrics of a step.

    What is measured stays on the device until the end of the step: no pass waits for it.
    """

    def __init__(self, algorithm: Algorithm, *, temperature: float, forward_tokens: int) -> None:
        self.algorithm = algorithm
        self._temperature = temperature
        self._forward_tokens = forward_tokens
        self.numbers: dict[str, float] = first_numbers(algorithm)
        """Numbers of an `Adaptive` algorithm in the step in training, equal on all ranks; empty for others."""
        terms = algorithm.terms(example_tokens(algorithm))
        self._counts = {term.name: DENOMINATORS[term.per] for term in terms}
        needs, plan = algorithm.needs, algorithm.plan
        self.is_deferred = plan.optimizer_steps > 1 or needs.scope == "step" or len(set(self._counts.values())) > 1
        """Whether the backward passes of a step wait for its last sample (`DeferredStep`)."""
        self.needs_forward = self.is_deferred and (plan.anchor == "step" or needs.token_statistics)
        """Whether a deferred step needs log-probabilities under the policy before its first update."""
        self._metrics = tuple(dict.fromkeys(name for term in terms for name in term.metrics))
        self._means = {name: DENOMINATORS[term.per] for term in terms for name in term.means}
        self._sums: dict[str, float] = defaultdict(float)
        self._measured: dict[tuple[str, ...], Tensor] = {}  # sums on the device by their names, float64
        self._ratios: list[_Ratios] = []  # of passes whose divergence is not in `_of_age` yet
        self._of_age = torch.zeros(2, AGES, dtype=torch.float64)  # sums of k3, counts of tokens, where usable
        self._unusable_tokens = 0.0  # generated with the present weights

    @property
    def denominator(self) -> str:
        """Name of the global count (a key of `global_sums`) that divides the gradient, unless the step is deferred."""
        return next(iter(self._counts.values()))

    @property
    def metric_names(self) -> list[str]:
        """Names of a step's metrics that only this algorithm has."""
        losses = [f"{name}_loss" for name in self._counts]
        return [*self._metrics, *self._means, *self.numbers, *(losses if len(losses) > 1 else [])]

    def cut(self, model: Any, batch: TrainingBatch, rows: Sequence[int] | None = None) -> list[list[int]]:
        """Rows of the batch in each pass, out of these rows (None: all)."""
        chosen = range(len(batch.responses)) if rows is None else rows
        if self.algorithm.needs.whole_groups:
            groups_N = batch.groups_N.tolist()
            groups = dict.fromkeys(groups_N[row] for row in chosen)
            return [[row for row in chosen if groups_N[row] == group] for group in groups]
        passes = cut_into_passes(
            model,
            [batch.prompts[row] for row in chosen],
            [batch.responses[row] for row in chosen],
            self._forward_tokens,
        )
        return [[chosen[place] for place in places] for places in passes]

    @torch.no_grad()
    def forward(self, model: Any, batch: TrainingBatch, rows: Sequence[int]) -> tuple[list[Tensor], list[Tensor]]:
        """Log-probabilities [T] (nats) of these samples under the present policy, and entropies [T]; on the CPU.

        The list of entropies is empty unless the algorithm needs them.
        """
        responses = [batch.responses[row] for row in rows]
        computed = self._predict(model, batch, rows, all_recorded_logprobs(batch, rows))
        lengths = [len(response) for response in responses]
        entropies = [] if computed.entropy_T is None else list(computed.entropy_T.cpu().split(lengths))
        return list(computed.logprobs_T.cpu().split(lengths)), entropies

    def loss_sum(
        self, model: Any, batch: TrainingBatch, rows: Sequence[int], deferred: "DeferredPass | None" = None
    ) -> Tensor:
        """Scalar loss of these samples, differentiable; updates the metrics of the step.

        Without ``deferred`` it is a sum, which the step divides by `denominator`; with it, the sum of terms that are
        already divided by their global counts.
        """
        responses = [batch.responses[row] for row in rows]
        recorded = all_recorded_logprobs(batch, rows)
        computed = self._predict(model, batch, rows, recorded)
        logprobs_T = computed.logprobs_T
        device = logprobs_T.device
        valid_N = torch.tensor([record is not None for record in recorded])
        present_T = logprobs_T.detach()
        valid_T = valid_N.repeat_interleave(torch.tensor([len(response) for response in responses]))
        rollout_T, reference_T = _columns(recorded, responses, present_T, batch.reference_logprobs is not None)
        before_T = present_T
        if deferred is not None and deferred.before:
            before_T = torch.cat([deferred.before[row] for row in rows]).to(present_T)
        if batch.captures is not None:
            _capture(before_T, [batch.captures[row] for row in rows], [len(response) for response in responses])
        anchors = {"present": present_T, "rollout": rollout_T, "step": before_T}
        tokens = Tokens(
            logprobs_T=logprobs_T,
            anchor_T=anchors[self.algorithm.plan.anchor],
            rollout_T=rollout_T,
            sample_T=computed.sample_T,
            advantages_N=batch.advantages_N[rows].to(device),
            weights_N=batch.weights_N[rows].to(device),
            group_N=batch.groups_N[rows].to(device),
            valid_T=valid_T.to(device, logprobs_T.dtype),
            reference_T=reference_T,
            entropy_T=computed.entropy_T,
            step={} if deferred is None else deferred.statistics,
            numbers=self.numbers,
        )
        terms = self.algorithm.terms(tokens)
        if batch.ages is not None:
            ages_T = torch.cat([batch.ages[row] for row in rows])
            self._ratios.append(_Ratios(clamped_log_ratio_T(before_T, rollout_T), valid_T, ages_T))
        self._add(tokens, terms, groups=len(batch.groups_N[rows].unique()), invalid=int((~valid_N).sum()))
        if deferred is not None:
            losses = [term.loss_sum / deferred.counts[DENOMINATORS[term.per]] for term in terms]
        else:
            losses = [term.loss_sum for term in terms]
        return losses[0] if len(losses) == 1 else torch.stack(losses).sum()

    def _predict(
        self, model: Any, batch: TrainingBatch, rows: Sequence[int], recorded: Sequence[Recorded | None]
    ) -> _Predicted:
        logprobs_T, entropy_T, samples = response_predictions(
            model,
            [batch.prompts[row] for row in rows],
            [batch.responses[row] for row in rows],
            self._temperature,
            entropy=self.algorithm.needs.entropy,
            supports=_supports(batch, rows, recorded),
        )
        return _Predicted(logprobs_T, entropy_T, samples.sample_T.to(logprobs_T.device))

    def _add(self, tokens: Tokens, terms: Sequence[Term], *, groups: int, invalid: int) -> None:
        present_T = tokens.logprobs_T.detach()
        delta_T = clamped_log_ratio_T(present_T, tokens.rollout_T)
        counts = zip(COUNTS[1:-1], (len(present_T), tokens.samples, groups, invalid), strict=True)
        for count, number in counts:
            self._sums[count] += number
        ratio_T = delta_T.double().exp()
        measured = [
            ("valid_tokens", tokens.valid_T.sum()),
            *zip(MEANS, (-present_T.sum(),), strict=True),
            *zip(MISMATCHES, (-delta_T.sum(), (delta_T.expm1() - delta_T).sum()), strict=True),
            *zip(RATIOS, ((power_T * tokens.valid_T).sum() for power_T in (ratio_T, ratio_T.square())), strict=True),
        ]
        for term in terms:
            measured += [(f"{term.name}_loss", term.loss_sum), *term.metrics.items(), *term.means.items()]
        names = tuple(name for name, _ in measured)
        values = torch.stack([torch.as_tensor(value, device=present_T.device).detach() for _, value in measured])
        before = self._measured.get(names)
        self._measured[names] = values if before is None else before + values

    def _read(self) -> None:
        """Add what passes have measured on the device to the sums on the host, by one transfer."""
        ratios, self._ratios = self._ratios, []
        measured, self._measured = self._measured, {}
        if not measured and not ratios:
            return
        values = torch.cat([*measured.values(), *(ratio.ratio_T.double() for ratio in ratios)]).cpu()
        sizes = [len(names) for names in measured] + [len(ratio.ratio_T) for ratio in ratios]
        parts = list(values.split(sizes))
        for names, sums in zip(measured, parts, strict=False):
            for name, value in zip(names, sums.tolist(), strict=True):
                self._sums[name] += value
        for ratio_T, (_, valid_T, ages_T) in zip(parts[len(measured) :], ratios, strict=True):
            k3_T = (ratio_T.expm1() - ratio_T) * valid_T
            self._of_age.index_add_(1, ages_T.long().clamp(max=AGES - 1), torch.stack([k3_T, valid_T.double()]))
            self._unusable_tokens += float((~valid_T & (ages_T == 0)).sum())

    def check_equal_weights(self, limit: float, model: str) -> None:
        """Check the rollout's log-probabilities of tokens that were generated with the present weights. Collective.

        For the first update of an engine, after its passes and before the update.

        Args:
            limit: largest KL divergence (k3 estimate of KL(rollout || trainer), in nats per token); 0: no check.
            model: name of the model, for the error.

        Raises:
            ConfigError: on all ranks, if the divergence is above the limit, or not a number, or if there are such
                tokens, and none has a usable log-probability.
        """
        if not limit:
            return
        self._read()
        totals = torch.tensor([*self._of_age[:, 0].tolist(), self._unusable_tokens], dtype=torch.float64)
        if ranks() > 1:
            dist.all_reduce(totals)
        k3, tokens, unusable = totals.tolist()
        if unusable and not tokens:
            raise ConfigError(
                f"model {model}: the rollout's log-probabilities of all samples of the first step ({unusable:,.0f} "
                "tokens) are unusable (not finite, above 0, of probability 0, or not one a token), so nothing was "
                "trained: compare the dtypes of rollout and trainer, or use another rollout engine"
            )
        if tokens and not k3 / tokens <= limit:
            raise ConfigError(
                f"model {model}: rollout and trainer disagree by {k3 / tokens:.2g} nats a token at equal weights, over "
                f"{tokens:,.0f} tokens; trainer.max_initial_mismatch allows {limit:g}, so nothing was trained: compare "
                "their dtypes, use another rollout engine, or raise the limit"
            )

    def note_batch(self) -> None:
        """Count a micro-batch, also if none of its samples is trained."""
        self._sums["batches"] += 1

    def reset(self) -> None:
        """Clear the sums of the last step."""
        self._sums.clear()
        self._measured.clear()
        self._ratios.clear()
        self._of_age.zero_()
        self._unusable_tokens = 0.0

    def global_sums(self) -> dict[str, float]:
        """The step's sums over all ranks, by name. Collective; a rank without micro-batches adds zeros."""
        self._read()
        names = (
            *COUNTS,
            *(f"{name}_loss" for name in self._counts),
            *MEANS,
            *MISMATCHES,
            *RATIOS,
            *self._metrics,
            *self._means,
        )
        totals = torch.cat([torch.tensor([self._sums[name] for name in names], dtype=torch.float64), *self._of_age])
        if ranks() > 1:
            dist.all_reduce(totals)
        return dict(zip((*names, *K3_OF_AGE, *TOKENS_OF_AGE), totals.tolist(), strict=True))

    def untrained_metrics(self, sums: dict[str, float], lr: float) -> dict[str, float]:
        """Metrics of a step without a trained token: empty if it had no micro-batch on any rank.

        The credit may exclude all samples of a step, for example if the rewards of every group are equal and the
        objective trains pairs of a better and a worse sample.
        """
        if not sums["batches"]:
            return {}
        log.warning("no sample of this step is trained (are the rewards of every group equal?); the weights stay")
        return {"loss": 0.0, "grad_norm": 0.0, "lr": lr}

    def step_metrics(self, sums: dict[str, float], grad_norm: float, lr: float) -> dict[str, float]:
        """Metrics of a step, from its global sums. An `Adaptive` algorithm's numbers become those of the next step.

        The loss and the means of each term are divided by its count, and ``loss`` is the sum of these losses; other
        sums are divided by the number of tokens; comparisons of rollout and trainer by that of tokens with usable
        log-probabilities, and left out without any. With several updates, sums and counts are over all of them.
        ``divergence_AGE`` is the k3 estimate of KL(rollout || trainer) over tokens of staleness AGE (versions), with
        the trainer's policy before the step, or, in a step that does not compute it (`needs_forward`), the policy of
        each pass.
        ``effective_sample_fraction`` is Kish's, over the ratios w of policy over rollout: (sum of w)^2 /
        (tokens x sum of w^2), which is 1 where all ratios are equal.
        """
        tokens, samples, valid = sums["tokens"], sums["samples"], sums["valid_tokens"]
        trained = samples / self.algorithm.plan.epochs
        invalid = sums["invalid_samples"] / self.algorithm.plan.epochs
        losses = {f"{name}_loss": sums[f"{name}_loss"] / sums[count] for name, count in self._counts.items()}
        metrics = {"loss": sum(losses.values())} | (losses if len(losses) > 1 else {})
        metrics |= {name: sums[name] / tokens for name in (*MEANS, *self._metrics)}
        metrics |= {name: sums[name] / sums[count] for name, count in self._means.items()}
        if valid:
            ratios, squares = (sums[name] for name in RATIOS)
            metrics |= {name: sums[name] / valid for name in MISMATCHES}
            metrics[EFFECTIVE_FRACTION] = ratios**2 / (valid * squares)
        for age, (k3, count) in enumerate(zip(K3_OF_AGE, TOKENS_OF_AGE, strict=True)):
            if sums[count]:
                metrics[f"{DIVERGENCE}{age}"] = sums[k3] / sums[count]
        if invalid:
            log.warning("%d of %d samples have unusable log-probabilities and were not trained", invalid, trained)
        metrics |= {
            **self.numbers,
            "invalid_samples": invalid,
            "grad_norm": grad_norm,
            "lr": lr,
            "response_length": tokens / samples,
        }
        if isinstance(self.algorithm, Adaptive):
            self.numbers = self.algorithm.next_numbers(self.numbers, metrics, trained)
        return metrics

    def restore_numbers(self, saved: Mapping[str, float]) -> None:
        """Continue with the numbers of a checkpoint; a number that is not in the checkpoint has its first value."""
        self.numbers = first_numbers(self.algorithm) | {
            name: value for name, value in saved.items() if name in self.numbers
        }


def _capture(logprobs_T: Tensor, captures: Sequence[Capture | None], lengths: Sequence[int]) -> None:
    """Record the log-probabilities of samples that are stored, the first time they are computed."""
    wanted = [capture is not None and capture.logprobs_T is None for capture in captures]
    if not any(wanted):
        return
    for capture, row_T in zip(captures, logprobs_T.cpu().split(list(lengths)), strict=True):
        if capture is not None and capture.logprobs_T is None:
            capture.logprobs_T = row_T.clone()


def _supports(batch: TrainingBatch, rows: Sequence[int], recorded: Sequence[Recorded | None]) -> list[Support] | None:
    """The support of each sample; for a sample with unusable records, its own tokens. None without truncation."""
    if batch.supports is None:
        return None
    return [
        batch.supports[row] if record is not None else singletons(batch.responses[row])
        for row, record in zip(rows, recorded, strict=True)
    ]


def recorded_logprobs(batch: TrainingBatch, row: int) -> Recorded | None:
    """Recorded log-probabilities of a sample under the rollout policy and the reference; None if they are unusable."""
    rollout = batch.rollout_logprobs[row]
    reference = None if batch.reference_logprobs is None else batch.reference_logprobs[row]
    length = len(batch.responses[row])
    if batch.supports is not None and not batch.supports[row].fits(batch.responses[row]):
        return None
    if len(rollout) != length or not bool(((rollout > MIN_LOGPROB) & (rollout < MAX_LOGPROB)).all()):
        return None
    if reference is not None and (len(reference) != length or not bool(reference.isfinite().all())):
        return None
    return rollout, reference


def all_recorded_logprobs(batch: TrainingBatch, rows: Sequence[int]) -> list[Recorded | None]:
    """`recorded_logprobs` of these samples. Checks all samples at once, and one by one only if that check fails."""
    rollout = [batch.rollout_logprobs[row] for row in rows]
    reference = None if batch.reference_logprobs is None else [batch.reference_logprobs[row] for row in rows]
    lengths = [len(batch.responses[row]) for row in rows]
    usable = batch.supports is None and sum(lengths) > 0 and list(map(len, rollout)) == lengths
    if usable and reference is not None:
        usable = list(map(len, reference)) == lengths and bool(torch.cat(reference).isfinite().all())
    if usable:
        low, high = torch.cat(rollout).aminmax()  # NaN if any value is NaN
        usable = bool((low > MIN_LOGPROB) & (high < MAX_LOGPROB))
    if not usable:
        return [recorded_logprobs(batch, row) for row in rows]
    if reference is None:
        return [(logprobs, None) for logprobs in rollout]
    return list(zip(rollout, reference, strict=True))


def _columns(
    recorded: Sequence[tuple[Tensor, Tensor | None] | None],
    responses: Sequence[Tensor],
    present_T: Tensor,
    has_reference: bool,
) -> tuple[Tensor, Tensor | None]:
    """The recorded columns [T] of a pass; for samples with unusable records, the values of the present policy."""
    device = present_T.device
    if all(record is not None for record in recorded):
        usable = [record for record in recorded if record is not None]
        rollout_T = torch.cat([rollout for rollout, _ in usable]).to(device)
        reference_T = (
            torch.cat([reference for _, reference in usable if reference is not None]).to(device)
            if has_reference
            else None
        )
        return rollout_T, reference_T
    present = present_T.split([len(response) for response in responses])
    rollout_T = torch.cat(
        [own if record is None else record[0].to(own) for record, own in zip(recorded, present, strict=True)]
    )
    if not has_reference:
        return rollout_T, None
    pairs = zip(recorded, present, strict=True)
    return rollout_T, torch.cat(
        [own if record is None or record[1] is None else record[1].to(own) for record, own in pairs]
    )


def first_numbers(algorithm: Algorithm) -> dict[str, float]:
    """Numbers of the first step of an `Adaptive` algorithm; empty for others."""
    return algorithm.first_numbers() if isinstance(algorithm, Adaptive) else {}


def example_tokens(algorithm: Algorithm) -> Tokens:
    """Two tokens of two samples of one group, from which the names of terms and metrics are found."""
    logprobs_T = torch.full((2,), -1.0, requires_grad=True)
    return Tokens(
        logprobs_T=logprobs_T,
        anchor_T=logprobs_T.detach(),
        rollout_T=logprobs_T.detach(),
        sample_T=torch.tensor([0, 1]),
        advantages_N=torch.tensor([1.0, -1.0]),
        weights_N=torch.ones(2),
        group_N=torch.zeros(2, dtype=torch.int64),
        valid_T=torch.ones(2),
        reference_T=logprobs_T.detach() if algorithm.needs.reference else None,
        entropy_T=torch.ones(2, requires_grad=True) if algorithm.needs.entropy else None,
        step=algorithm.measure(example_step(algorithm)) if algorithm.needs.token_statistics else {},
        numbers=first_numbers(algorithm),
    )


def example_step(algorithm: Algorithm) -> StepTokens:
    """The tokens of `example_tokens` as the tokens of a whole step."""
    logprobs_T = torch.full((2,), -1.0)
    return StepTokens(
        logprobs_T=logprobs_T,
        anchor_T=logprobs_T,
        rollout_T=logprobs_T,
        advantages_T=torch.tensor([1.0, -1.0]),
        entropy_T=torch.ones(2) if algorithm.needs.entropy else None,
    )


def ranks() -> int:
    """Number of data-parallel ranks."""
    return dist.get_world_size() if dist.is_initialized() else 1


def rank() -> int:
    """Index of this data-parallel rank."""
    return dist.get_rank() if dist.is_initialized() else 0
