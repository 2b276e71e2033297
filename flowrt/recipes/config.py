"""The configuration of a run: parsed once on the controller's side and sent to every worker.

- Every number has its bounds on its field; constraints between fields are in `flowrt.recipes.constraints`.
- The text below a field is its help text and its row in docs/reference/configuration.md.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Annotated, Any, Literal, TypeVar, get_type_hints

from annotated_types import Interval

from flowrt.controller.policies.curriculum import MIN_FLOOR
from flowrt.engines.options import (
    Device,
    DtypeOrAuto,
    LearningRate,
    RestartCount,
    RolloutSettings,
    SamplingOptions,
    StepCount,
    TrainerSettings,
    Truncation,
)
from flowrt.engines.prompts import PromptFormat
from flowrt.engines.registry import RolloutEngineName, TrainEngineName
from flowrt.rewards.options import RewardOptions
from flowrt.runtime.bounds import MAX_INT64, MAX_TIMEOUT_S, Seconds
from flowrt.runtime.conditions import OnlyIf

Table = TypeVar("Table")
MAX_LIVE_SAMPLES = 1_000_000
"""Maximum number of samples in all steps in progress: the controller keeps a row in memory for each."""
EMBEDDED = OnlyIf("model", have=("",), off=(0,))
READS_FILES = OnlyIf("recipe", but=("arithmetic",))
EVALUATES = OnlyIf("eval.interval", but=(0,), or_keys=("eval.at_start", "eval.at_end", "eval.only"))
WITH_PROMPTS = OnlyIf("data.eval_prompts", but=(0, ()), or_keys=("eval.data",))
AT_INTERVALS = OnlyIf("eval.interval", but=(0,))
BEFORE_END = OnlyIf("eval.interval", but=(0,), or_keys=("eval.at_start",))
WITH_DIFFICULTY = OnlyIf("data.difficulty_key", but=("",))
WITH_SFT = OnlyIf("sft.steps", but=(0,))
WITH_ANSWERS = OnlyIf("sft.answer_only_steps", but=(0,))
WITH_ANY_SFT = OnlyIf("sft.steps", but=(0,), or_keys=("sft.answer_only_steps",))
SEVERAL_RANKS = OnlyIf("trainer.ranks", but=(1,))
WITH_CHECKPOINTS = OnlyIf("checkpoint.every", but=(0,), off=(0.0,))
WITH_CHECKPOINTS_OR_MODELS = OnlyIf("checkpoint.every", but=(0,), or_keys=("checkpoint.hf_every",))
WITH_RESTARTS = OnlyIf("supervisor.max_worker_restarts", but=(0,))
BY_TOKENS = OnlyIf("trainer.micro_batch_samples", have=(0,))
WITH_TOKEN_LOSS = OnlyIf("algorithm.loss.type", but=("dpo",))
WITH_ADVANTAGES = OnlyIf("algorithm.advantage.keep_best", have=(0,))
WITH_SCALE = OnlyIf("algorithm.advantage.scale", but=("none", False), or_keys=("algorithm.advantage.whiten",))
WITH_CORRECTION = OnlyIf("algorithm.correction.level", but=("off",))
WITH_KL = OnlyIf("algorithm.kl.coef", but=(0,))
KL_IN_LOSS = OnlyIf("algorithm.kl.where", have=("loss",))
KL_OR_ADVANTAGES = OnlyIf("algorithm.advantage.keep_best", have=(0, "loss"), or_keys=("algorithm.kl.where",))
Limit = Annotated[float | None, Interval(ge=-1_000_000_000_000, le=1_000_000_000_000)]
RewardLimit = Annotated[float | None, Interval(ge=-1_000_000_000, le=1_000_000_000)]
ClipRange = Annotated[float, Interval(ge=0, le=1_000)]
Reward = Annotated[float, Interval(ge=-1_000_000_000, le=1_000_000_000)]


@dataclass(frozen=True)
class DataSetConfig:
    """One of several data sets.

    In a file a table `[[data.sets]]` each, as a flag `--data "NAME=PATH:WEIGHT [KEY=VALUE ...]"`. What a set leaves out
    is as in data.
    """

    name: str
    """Name in metrics and in the ledger: letters, digits, - and _."""
    path: str
    """File or directory of rows, as data.path."""
    weight: Annotated[float, Interval(gt=0, le=1_000_000)] = 1.0
    """Share of the prompts of each step, relative to the weights of the other sets."""
    split: str | None = None
    """Of this set, in place of data.split; so for all keys below."""
    prompt_key: str | None = None
    """Of this set, in place of data.prompt_key."""
    answer_key: str | None = None
    """Of this set, in place of data.answer_key."""
    system_prompt: str | None = None
    """Of this set, in place of data.system_prompt."""
    chat_template: str | None = None
    """Of this set, in place of data.chat_template."""
    chat_template_kwargs: str | None = None
    """Of this set, in place of data.chat_template_kwargs."""
    tools: str | None = None
    """Of this set, in place of data.tools."""
    tools_key: str | None = None
    """Of this set, in place of data.tools_key."""


@dataclass(frozen=True)
class DataConfig:
    """Prompts."""

    path: str = ""
    """Rows, one problem each: a JSON Lines, JSON, CSV, TSV (also gzipped), Parquet or Arrow file, or a directory that
    datasets has saved or that is a snapshot of a data set on the Hub; recipe arithmetic generates its problems."""
    sets: tuple[DataSetConfig, ...] = ()
    """Recipe custom: several data sets in place of the path, mixed by weight: tables `[[data.sets]]`, or flags
    `--data NAME=PATH:WEIGHT`."""
    split: Annotated[str, READS_FILES] = "train"
    """Split that is read from a directory."""
    prompt_key: Annotated[str, READS_FILES] = "question"
    """Column of the prompt: text, or, with recipe custom, a list of messages with role and content."""
    answer_key: Annotated[str, READS_FILES] = "answer"
    """Column of the reference answer; A.B is key B in column A."""
    chat_template: str = ""
    """Chat template of prompts: none (text as it is), chat (text is a message of the user), or a Jinja file; empty:
    messages take the template of the checkpoint, and text for a checkpoint that has one is refused."""
    chat_template_kwargs: str = ""
    """Variables of the chat template, a JSON object, such as {"enable_thinking": false}."""
    system_prompt: str = ""
    """System message of conversations that begin with none."""
    tools: str = ""
    """Tools that the chat template shows for every prompt without tools of its own: a JSON list of their schemas, or a
    file with it."""
    tools_key: str = "tools"
    """Recipe custom: column of the tools of a row, a list of their schemas or JSON text of one, which rows may lack;
    empty: none."""
    prefill: bool = False
    """Recipe custom: whether a last message of role assistant is the beginning of the response."""
    max_prompt_tokens: Annotated[int, Interval(ge=0, le=16_777_216)] = 0
    """Maximum length of a prompt, in tokens; 0: what the positions of the model leave for it."""
    overlong: Literal["error", "drop"] = "error"
    """Prompts that are longer: refuse the data, or leave these rows out."""
    allow_overlap: bool = False
    """Recipe custom: whether held-out prompts may be training prompts too."""
    order: Literal["shuffled", "easy_first", "as_is"] = "shuffled"
    """Order of the rows of a data set in each pass: drawn from the seed, by ascending difficulty, or as they are."""
    difficulty_key: str = ""
    """Recipe custom: column of the difficulty, a number; A.B is key B in column A."""
    min_difficulty: Annotated[Limit, WITH_DIFFICULTY] = None
    """Rows of a lower difficulty are left out."""
    max_difficulty: Annotated[Limit, WITH_DIFFICULTY] = None
    """Rows of a higher difficulty are left out."""
    epochs: Annotated[int, Interval(ge=0, le=1_000_000)] = 0
    """Passes over the data, of several sets over any one of them, after which the run ends early; 0: as many as the
    steps need."""
    check_timeout_s: Seconds = 600.0
    """Task of your own (FILE.py): deadline for making it and reading all its prompts before a run, in seconds."""
    eval_prompts: Annotated[int, Interval(ge=0, le=100_000)] = 256
    """Held-out prompts, the last rows, of several sets in proportion to the weights; 0: none, as with eval.data."""

    @property
    def difficulties(self) -> tuple[float, float]:
        """The lowest and the highest difficulty of rows that are not left out."""
        return _range(self.min_difficulty, self.max_difficulty)

    @property
    def prompt_format(self) -> PromptFormat:
        """How prompts become token ids.

        Raises ConfigError if the variables of the template are no JSON object, and if there are variables or a system
        prompt with template none.
        """
        return PromptFormat.of(
            self.chat_template,
            self.chat_template_kwargs,
            self.system_prompt,
            prefill=self.prefill,
            tools=self.tools,
        )


@dataclass(frozen=True)
class EvalConfig:
    """Evaluation: answers to held-out prompts, all of one version of the weights; training goes on meanwhile."""

    data: tuple[str, ...] = ()
    """Data sets "NAME=PATH [KEY=VALUE ...]" of prompts to evaluate, in the form of --data, with the keys of
    [[data.sets]]; repeatable; none: the held-out rows, as held_out."""
    split: str = ""
    """Split that is read from a directory of eval.data; empty: test, else validation."""
    interval: Annotated[int, Interval(ge=0, le=10_000_000), WITH_PROMPTS] = 0
    """Optimiser steps between evaluations; 0: only at the ends."""
    at_start: bool = True
    """Evaluate the initial weights, before training."""
    at_end: bool = True
    """Evaluate the last weights."""
    samples: Annotated[int, Interval(ge=1, le=65_536), WITH_PROMPTS, EVALUATES] = 1
    """Answers to each prompt, over which avg@k and pass@k are measured."""
    max_new_tokens: Annotated[int, Interval(ge=0, le=16_777_216), WITH_PROMPTS, EVALUATES] = 0
    """Maximum length of an answer, in tokens; 0: rollout.max_new_tokens."""
    temperature: Annotated[float | None, Interval(ge=0, le=100), WITH_PROMPTS, EVALUATES] = None
    """Sampling temperature; 0: the most likely token; not given: 0 with one sample, rollout.temperature with more."""
    top_k: Annotated[int, Interval(ge=0, le=4_096), EVALUATES] = 0
    """Sample from this many most likely tokens; 0: from all."""
    top_p: Annotated[float, Interval(gt=0, le=1), EVALUATES] = 1.0
    """Sample from the fewest most likely tokens whose probabilities sum to this; 1: from all."""
    min_p: Annotated[float, Interval(ge=0, lt=1), EVALUATES] = 0.0
    """Sample from the tokens of at least this fraction of the highest probability; 0: from all."""
    limit: Annotated[int, Interval(ge=0, le=1_000_000), WITH_PROMPTS, EVALUATES] = 0
    """Prompts of each data set, the first ones; 0: all."""
    overlap: Annotated[Literal["skip", "wait"], AT_INTERVALS] = "skip"
    """An evaluation that is due while another one runs: skip it, unless its version is still there afterwards; or let
    it wait, its version kept in the trainer's memory, for at most two at a time."""
    only: bool = False
    """Only evaluate the weights that the run starts from: no trainer is started, and nothing is trained."""
    solved_reward: Annotated[Reward, WITH_PROMPTS, EVALUATES] = 1.0
    """Reward from which an answer counts as right, in pass@k."""
    stop_at: Annotated[Reward, WITH_PROMPTS, BEFORE_END] = 0.0
    """End training once the mean reward of an evaluation of the first data set reaches this; 0: never."""

    def sampling(self, rollout_temperature: float) -> SamplingOptions | None:
        """How answers are sampled; None: the most likely tokens.

        Args:
            rollout_temperature: the temperature of several samples if `temperature` is not given.
        """
        temperature = self.temperature
        if temperature is None:
            temperature = rollout_temperature if self.samples > 1 else 0.0
        return SamplingOptions(temperature, self.truncation) if temperature else None

    @property
    def truncation(self) -> Truncation:
        """The tokens that can be drawn."""
        return Truncation(self.top_k, self.top_p, self.min_p)


@dataclass(frozen=True)
class BuildConfig:
    """The embedded model, a small Qwen3 decoder, built when no --model is given."""

    hidden_size: Annotated[int, Interval(gt=0, le=65_536)] = 128
    """Width of the residual stream."""
    layers: Annotated[int, Interval(gt=0, le=1_024)] = 5
    """Number of decoder layers."""
    heads: Annotated[int, Interval(gt=0, le=1_024)] = 4
    """Query heads per layer; there are half as many key-value heads."""
    intermediate_size: Annotated[int, Interval(gt=0, le=1_048_576)] = 384
    """Width of the feed-forward layers."""
    vocab_size: Annotated[int, Interval(gt=0, le=1_048_576), READS_FILES] = 1024
    """Vocabulary size of the byte-level BPE tokenizer, for recipes that train one."""
    max_length: Annotated[int, Interval(gt=0, le=16_777_216)] = 512
    """Maximum sequence length, prompt plus response, in tokens."""


@dataclass(frozen=True)
class SftConfig:
    """Supervised fine-tuning (SFT) of the embedded model before RL; not applied to a --model."""

    steps: StepCount = 140
    """Maximum number of optimiser steps on worked solutions; 0: no SFT."""
    batch: Annotated[int, Interval(gt=0, le=65_536), WITH_ANY_SFT] = 32
    """Solutions per step."""
    lr: Annotated[LearningRate, WITH_SFT] = 2e-3
    """Learning rate."""
    eval_prompts: Annotated[int, Interval(gt=0, le=100_000), WITH_ANY_SFT] = 256
    """Prompts per evaluation of the mean reward."""
    stop_reward: Annotated[Reward, WITH_SFT] = 0.85
    """Stop early once the mean reward of sampled answers reaches this."""
    answer_only_steps: StepCount = 40
    """Maximum number of steps of a second stage on mostly answers without working; 0: no second stage."""
    answer_only_lr: Annotated[LearningRate, WITH_ANSWERS] = 1e-3
    """Learning rate of the second stage."""
    answer_only_stop_reward: Annotated[Reward, WITH_ANSWERS] = 0.25
    """Stop the second stage once the mean reward of sampled answers falls to this."""


@dataclass(frozen=True)
class ImmediateSync:
    """Every version."""

    type: Literal["immediate"] = "immediate"


@dataclass(frozen=True)
class RollingSync:
    """A few workers at a time."""

    type: Literal["rolling"] = "rolling"
    max_concurrent: Annotated[int, Interval(ge=1, le=10_000)] = 1
    """Workers that receive or activate weights at a time."""


@dataclass(frozen=True)
class EveryNSync:
    """Every n-th version."""

    type: Literal["every_n"] = "every_n"
    interval: Annotated[int, Interval(ge=1, le=10_000)] = 2
    """Versions between two updates."""


@dataclass(frozen=True)
class DivergenceSync:
    """Once the trainer's policy has moved far enough from the worker's."""

    type: Literal["divergence"] = "divergence"
    threshold: Annotated[float, Interval(ge=-1_000_000_000_000, le=1_000_000_000_000)] = 1e-3
    """Divergence of the trainer from a worker (k3, nats per token) that triggers an update."""
    max_age: Annotated[int, Interval(ge=1, le=10_000)] = 4
    """Versions behind at which a worker updates regardless of the divergence."""


WeightSync = ImmediateSync | RollingSync | EveryNSync | DivergenceSync


@dataclass(frozen=True)
class FifoDispatch:
    """In order of issue."""

    type: Literal["fifo"] = "fifo"


@dataclass(frozen=True)
class LengthAwareDispatch:
    """Prompts whose responses were long in earlier epochs get rollout workers of their own."""

    type: Literal["length_aware"] = "length_aware"
    tail_fraction: Annotated[float, Interval(ge=0, le=1)] = 0.2
    """Maximum fraction of the prompts of a step that count as long; 0: fifo."""
    row_cost: Annotated[float, Interval(ge=0, le=1_000)] = 0.02
    """Time that each running sequence adds to a decoding step, relative to an empty one."""


DispatchOrder = FifoDispatch | LengthAwareDispatch


@dataclass(frozen=True)
class FilterConfig:
    """Group filter (dynamic sampling): groups that are not trained; other prompts are opened in their place."""

    zero_variance: bool = False
    """Filter groups whose rewards are all equal (DAPO, arXiv 2503.14476): they have no policy gradient."""
    min_reward: RewardLimit = None
    """Filter groups whose mean reward is below this."""
    max_reward: RewardLimit = None
    """Filter groups whose mean reward is above this."""
    function: str = ""
    """FILE.py:FUNCTION, called with the list of a group's rewards, and by name with what it takes of prompt, epoch,
    lengths and version; it returns True to keep the group, and a group on which it fails is filtered too."""
    function_timeout_s: Annotated[Seconds, OnlyIf("algorithm.filter.function", but=("",))] = 10.0
    """Deadline for loading the file of the function and for each call, in seconds."""
    tries: Annotated[int, Interval(ge=1, le=MAX_LIVE_SAMPLES)] = 128
    """Maximum number of groups filtered in a step; after that, groups are trained whatever their rewards are."""

    @property
    def rewards(self) -> tuple[float, float]:
        """The lowest and the highest mean reward of groups that are not filtered."""
        return _range(self.min_reward, self.max_reward)


@dataclass(frozen=True)
class UniformCurriculum:
    """Every prompt."""

    type: Literal["uniform"] = "uniform"


@dataclass(frozen=True)
class SolveRateCurriculum:
    """With the probability that its next group has both solved and failed samples, relative to solve rate 1/2, and
    every prompt that has not been trained yet."""

    type: Literal["solve_rate"] = "solve_rate"
    history: Annotated[int, Interval(ge=1, le=1_000)] = 8
    """Number of last groups of a prompt over which its solve rate is measured."""
    floor: Annotated[float, Interval(ge=MIN_FLOOR, le=1)] = 0.05
    """Probability of a prompt that is always or never solved; 1: uniform."""
    prior: Annotated[float, Interval(ge=0, le=1_000_000)] = 0.5
    """Solved and failed samples that are added to those measured, so that few samples do not decide; 0: the measured
    rate, 0.5: Jeffreys' prior, 1: a uniform prior."""
    failed_reward: Reward = 0.0
    """Mean reward of solve rate 0, and of every lower one."""
    solved_reward: Reward = 1.0
    """Mean reward of solve rate 1, and of every higher one."""


CurriculumOptions = UniformCurriculum | SolveRateCurriculum


@dataclass(frozen=True)
class RolloutConfig(RolloutSettings):
    """Rollout workers: generation of responses."""

    engine: RolloutEngineName = "torch"
    """Engine torch: PyTorch inside the worker; sglang: an SGLang server that the worker starts or connects to."""
    journal_s: Annotated[float, Interval(ge=0, le=MAX_TIMEOUT_S), OnlyIf("checkpoint.samples", but=(False,))] = 0.0
    """Seconds after which a worker writes the sequences in generation to its journal, so that they survive its sudden
    end up to there; 0: only complete samples, and sequences when the run is preempted."""
    weight_sync: WeightSync = field(default_factory=ImmediateSync)
    """When rollout workers update their weights; the staleness bound holds with every type."""


@dataclass(frozen=True)
class TrainerConfig(TrainerSettings):
    """The trainer: engine, data-parallel ranks, batching and output."""

    engine: TrainEngineName = "torch"
    """Engine torch: each rank holds the whole model; fsdp: parameters, gradients and optimiser state are sharded."""
    rank_timeout_s: Annotated[Seconds, SEVERAL_RANKS] = 240.0
    """How long the ranks wait for one that does not respond before the run restarts from a checkpoint, in seconds; keep
    it below controller.no_progress_timeout_s."""
    nodes: Annotated[int, Interval(gt=0, le=65_536)] = 1
    """Hosts over which the ranks are spread evenly; launch.trainer starts one torchrun on each."""
    micro_batch_tokens: Annotated[int, Interval(gt=0, le=1_000_000_000), BY_TOKENS] = 2048
    """Micro-batch size in tokens; training starts on a micro-batch once it is full or the step has no more samples."""
    micro_batch_samples: Annotated[int, Interval(ge=0, le=1_000_000)] = 0
    """Micro-batch size in samples, in whole groups, instead of tokens; 0: by micro_batch_tokens."""
    tokens_per_step: Annotated[int, Interval(ge=0, le=1_000_000_000_000)] = 0
    """Train on exactly this many response tokens per step (C3PO, arXiv 2506.14731), chosen by a seeded shuffle; 0: on
    all."""
    balance_ranks_by_tokens: Annotated[bool, SEVERAL_RANKS] = False
    """Partition each step among the ranks by token count in advance, instead of serving ranks on demand; no streaming
    within a step."""
    save: bool = True
    """Write the trained model at the end."""
    final_dir: Annotated[str, OnlyIf("trainer.save", have=(True,))] = ""
    """Directory of the trained model, on the host of trainer rank 0; empty: "final" in the run directory."""


@dataclass(frozen=True)
class ReferenceConfig:
    """Reference workers: log-probabilities under the reference model; none are started if the algorithm needs none."""

    workers: Annotated[int, Interval(gt=0, le=10_000)] = 1
    """Number of reference workers."""
    device: Device = ""
    """Device of each worker; auto: an accelerator if present; empty: that of the run, else cpu."""
    dtype: DtypeOrAuto = "auto"
    """Dtype of the model; auto: that of the trainer's forward passes, so that a policy that has not moved has a
    divergence of 0."""
    model: str = ""
    """Hugging Face checkpoint of the reference, with the vocabulary of the trained model; empty: the model that the run
    starts from."""
    refresh: Annotated[int, Interval(ge=0, le=1_000_000)] = 0
    """The reference takes the policy's weights after each this many steps; a sample is scored by the newest refresh up
    to the version of its first token; 0: never."""
    average: Annotated[float, Interval(gt=0, le=1), OnlyIf("reference.refresh", but=(0,))] = 1.0
    """At each refresh: average * policy + (1 - average) * reference, in float32; 1: a copy of the policy."""


@dataclass(frozen=True)
class AdvantageConfig:
    """From the rewards of a group to one advantage a sample: (reward - baseline) / scale."""

    baseline: Annotated[
        Literal["group_mean", "leave_one_out", "length_weighted", "batch_mean", "none"], WITH_ADVANTAGES
    ] = "group_mean"
    """What is subtracted from a reward: group_mean (GRPO), leave_one_out, the mean of the others (RLOO, arXiv
    2402.14740), length_weighted (OPO, arXiv 2505.23585), batch_mean, of all rewards of the step (FlashREINFORCE), or
    none."""
    scale: Annotated[Literal["group_std", "batch_std", "group_mean", "none"], WITH_ADVANTAGES] = "group_std"
    """What is divided by: the standard deviation of the group (GRPO) or of the step (Lite-PPO, arXiv 2508.08221), the
    group's mean (MaxRL, arXiv 2602.02710), or none (arXiv 2503.20783)."""
    eps: Annotated[float, Interval(gt=0, le=1), WITH_ADVANTAGES, WITH_SCALE] = 1e-6
    """Added to standard deviations; with scale group_mean: a group whose mean reward is not above it has no
    advantages."""
    whiten: Annotated[bool, WITH_ADVANTAGES] = False
    """Normalise the advantages of a step to mean 0 and standard deviation 1 (REINFORCE++, arXiv 2501.03262)."""
    keep_best: Annotated[int, Interval(ge=0, le=65_536)] = 0
    """Train on this many best samples of each group, with advantage 1, and on no others (RAFT, arXiv 2304.06767);
    0: off."""
    keep_above: Annotated[RewardLimit, OnlyIf("algorithm.advantage.keep_best", but=(0,))] = None
    """Samples with rewards up to this are not trained."""
    overlong_tokens: Annotated[int, Interval(ge=0, le=16_777_216), WITH_ADVANTAGES] = 0
    """Soft length penalty (DAPO, arXiv 2503.14476, equation 13): over the last this many tokens before
    rollout.max_new_tokens the reward falls by up to 1; 0: off."""
    mask_truncated: Annotated[bool, WITH_ADVANTAGES] = False
    """Do not train on responses that were cut at the length limit."""


@dataclass(frozen=True)
class TokenLoss:
    """A policy loss of tokens, and how it becomes the loss of a step."""

    type: str
    aggregation: Literal["token_mean", "sequence_mean", "constant"] = "token_mean"
    """Mean over the tokens of a step (DAPO), mean over samples of the mean over tokens (GRPO), or sum over
    rollout.max_new_tokens a sample (arXiv 2503.20783)."""


@dataclass(frozen=True)
class ClippedLoss(TokenLoss):
    """A policy loss with a clip range."""

    clip_low: Annotated[float, Interval(ge=0, le=1)] = 0.2
    """Lower clip range: ratios are clipped at 1 - clip_low."""
    clip_high: ClipRange = 0.2
    """Upper clip range: ratios are clipped at 1 + clip_high."""


@dataclass(frozen=True)
class ReinforceLoss(TokenLoss):
    """Log-probability times advantage."""

    type: Literal["reinforce"] = "reinforce"


@dataclass(frozen=True)
class PpoLoss(ClippedLoss):
    """Clipped ratio times advantage, also for GRPO and DAPO (arXiv 1707.06347)."""

    type: Literal["ppo"] = "ppo"
    dual_clip: Annotated[float | None, Interval(gt=1, le=1_000)] = None
    """Bound of the loss of tokens with negative advantage, in multiples of it (arXiv 1912.09729); not given: none."""
    delta: Annotated[float | None, Interval(gt=1, le=1_000)] = None
    """Bound of the unclipped ratio (INTELLECT-2, arXiv 2505.07291); not given: none."""


@dataclass(frozen=True)
class CispoLoss(ClippedLoss):
    """Log-probability weighted by the clipped ratio (arXiv 2506.13585)."""

    type: Literal["cispo"] = "cispo"
    clip_low: Annotated[float, Interval(ge=0, le=1)] = 1.0
    clip_high: ClipRange = 4.0


@dataclass(frozen=True)
class GspoLoss(ClippedLoss):
    """Clipped ratio of the whole sample (arXiv 2507.18071)."""

    type: Literal["gspo"] = "gspo"
    clip_low: Annotated[float, Interval(ge=0, le=1)] = 3e-4
    clip_high: ClipRange = 4e-4
    length_weighted: bool = False
    """Times the length of the sample (LUSPO, arXiv 2602.05261)."""


@dataclass(frozen=True)
class GmpoLoss(TokenLoss):
    """Geometric mean of a sample's clipped ratios (arXiv 2507.20673)."""

    type: Literal["gmpo"] = "gmpo"
    clip_low: ClipRange = 0.4
    """Lower clip range: log ratios are clipped at -clip_low."""
    clip_high: ClipRange = 0.4
    """Upper clip range: log ratios are clipped at clip_high."""


@dataclass(frozen=True)
class SapoLoss(TokenLoss):
    """Soft gate in place of a clip range (arXiv 2511.20347)."""

    type: Literal["sapo"] = "sapo"
    tau_positive: Annotated[float, Interval(gt=0, le=1_000)] = 1.0
    """Temperature of the gate for positive advantages."""
    tau_negative: Annotated[float, Interval(gt=0, le=1_000)] = 1.05
    """Temperature of the gate for negative advantages."""


@dataclass(frozen=True)
class DppoLoss(TokenLoss):
    """Masked where the probability of a token is far from the anchor's (arXiv 2602.04879)."""

    type: Literal["dppo"] = "dppo"
    distance: Literal["tv", "kl"] = "tv"
    """Distance of a token's probability from the anchor's."""
    limit: Annotated[float, Interval(gt=0, le=1_000)] = 0.2
    """Distance beyond which a token is masked."""
    max_ratio: Annotated[float, Interval(ge=1, le=1_000_000)] = 20.0
    """Bound of the ratio."""


@dataclass(frozen=True)
class VespoLoss(TokenLoss):
    """Log-probability weighted by a smooth function of the sample's ratio (arXiv 2602.10693)."""

    type: Literal["vespo"] = "vespo"
    k_positive: Annotated[float, Interval(gt=0, le=1_000)] = 2.0
    """Exponent of the sample's ratio for positive advantages."""
    lambda_positive: Annotated[float, Interval(gt=0, le=1_000)] = 3.0
    """Rate of the sample's ratio for positive advantages."""
    k_negative: Annotated[float, Interval(gt=0, le=1_000)] = 3.0
    """Exponent for negative advantages."""
    lambda_negative: Annotated[float, Interval(gt=0, le=1_000)] = 2.0
    """Rate for negative advantages."""


@dataclass(frozen=True)
class ToprLoss(TokenLoss):
    """Bounded ratio for negative advantages alone (arXiv 2503.14286)."""

    type: Literal["topr"] = "topr"
    cap: Annotated[float, Interval(gt=0, le=1_000_000)] = 1.0
    """Bound of the ratio of samples with negative advantage."""
    level: Literal["sequence", "token"] = "sequence"
    """Ratios of whole samples or of tokens."""


@dataclass(frozen=True)
class AspoLoss(ClippedLoss):
    """Inverted ratio for positive advantages (arXiv 2510.06062)."""

    type: Literal["aspo"] = "aspo"
    dual_clip: Annotated[float, Interval(gt=1, le=1_000)] = 3.0
    """Bound of the inverted ratio, and of the ratio of tokens with negative advantage."""


@dataclass(frozen=True)
class SurrogateLoss(TokenLoss):
    """Ratio times advantage, without a bound (arXiv 1707.06347, equation 6)."""

    type: Literal["surrogate"] = "surrogate"


@dataclass(frozen=True)
class SatLoss(ClippedLoss):
    """As ppo, with a clip range that shrinks for tokens far from the rollout policy (after arXiv 2607.18722)."""

    type: Literal["sat"] = "sat"
    quantile: Annotated[float, Interval(ge=0, le=1)] = 0.9
    """Share of the step's tokens, those nearest to the rollout policy, whose clip range is not contracted; 1: all, as
    loss ppo."""


@dataclass(frozen=True)
class CrossEntropyLoss(TokenLoss):
    """Supervised training on the samples, weighted by the advantage (RAFT, arXiv 2304.06767)."""

    type: Literal["cross_entropy"] = "cross_entropy"


@dataclass(frozen=True)
class DpoLoss:
    """Preference of the best over the worst sample of a group (online DPO, arXiv 2402.04792)."""

    type: Literal["dpo"] = "dpo"
    beta: Annotated[float, Interval(gt=0, le=1_000)] = 0.1
    """Inverse temperature of the preference."""
    nll_coef: Annotated[float, Interval(ge=0, le=1_000)] = 0.0
    """Weight of the mean negative log-likelihood of the best sample (arXiv 2404.19733); 0: none."""


Loss = (
    ReinforceLoss
    | PpoLoss
    | CispoLoss
    | GspoLoss
    | GmpoLoss
    | SapoLoss
    | DppoLoss
    | VespoLoss
    | ToprLoss
    | AspoLoss
    | SurrogateLoss
    | SatLoss
    | CrossEntropyLoss
    | DpoLoss
)


@dataclass(frozen=True)
class PlanConfig:
    """The optimiser updates of a step, and the policy that their ratios are measured from."""

    anchor: Literal["present", "rollout", "step"] = "present"
    """Denominator of the ratio: present, the trained policy itself (every ratio is 1); rollout, the policy that sampled
    the token; step, the policy before the first update of the step."""
    updates: Annotated[int, Interval(ge=1, le=1_000)] = 1
    """Mini-batches, in whole groups, that a step is cut into, each with an optimiser update; one version of the weights
    is published after the last."""
    epochs: Annotated[int, Interval(ge=1, le=1_000)] = 1
    """Passes over the samples of a step."""


@dataclass(frozen=True)
class CorrectionConfig:
    """Correction of the difference between the policy that sampled and the anchor."""

    level: Literal["off", "token", "sequence", "geometric"] = "token"
    """Importance weight, anchor over rollout: of each token, of the sample (the product), its geometric mean, or
    off."""
    mode: Annotated[Literal["truncate", "mask"], WITH_CORRECTION] = "truncate"
    """Weights outside [low, high] are truncated (TIS), or set to 0 (IcePop, arXiv 2510.18855)."""
    low: Annotated[float, Interval(ge=0, le=1), WITH_CORRECTION] = 0.0
    """Lower bound of the weight."""
    high: Annotated[float, Interval(ge=1, le=1_000_000), WITH_CORRECTION] = 2.0
    """Upper bound of the weight."""
    reject_low: Annotated[float, Interval(ge=0, le=1)] = 0.0
    """Mask samples whose geometric mean ratio, policy over rollout, is below this; 0: none."""
    reject_high: Annotated[float, Interval(ge=0, le=1_000_000)] = 0.0
    """Mask samples whose geometric mean ratio, policy over rollout, is above this (1 or more); 0: none."""
    reject_negative_kl: Annotated[float, Interval(ge=0, le=1_000)] = 0.0
    """Mask samples with negative advantage that have moved more than this from the rollout policy, in nats a token
    (DeepSeek-V3.2, arXiv 2512.02556); 0: none."""
    reject_binary_kl: Annotated[float, Interval(ge=0, le=1_000)] = 0.0
    """Mask samples whose mean KL of rollout and policy, of each token as one of two outcomes (this token, another), is
    above this, in nats a token (FlashREINFORCE); 0: none."""
    second_moment: Annotated[float, Interval(ge=0, le=1_000)] = 0.0
    """Mask the tokens with the largest squared log ratios until the mean of the rest is below this (M2PO, arXiv
    2510.01161); 0: none."""


@dataclass(frozen=True)
class KlConfig:
    """Penalty on the divergence from the reference model."""

    coef: Annotated[float, Interval(ge=0, le=1_000), KL_OR_ADVANTAGES] = 1e-3
    """Weight of the penalty; 0: none, and no reference worker is started."""
    where: Annotated[Literal["loss", "reward"], WITH_KL] = "loss"
    """As a term of the loss, or subtracted from the reward of each sample (sum over its tokens)."""
    estimator: Annotated[Literal["k1", "k2", "k3", "k3_with_k2_slope", "unbiased"], WITH_KL, KL_IN_LOSS] = "k3"
    """Estimator of the term in the loss: k1, k2, k3 (joschu.net/blog/kl-approx.html), the value of k3 with the slope of
    k2, or k3 with importance weights (arXiv 2512.02556)."""
    target: Annotated[float, Interval(ge=0, le=1_000), WITH_KL, KL_IN_LOSS] = 0.0
    """Divergence that the coefficient follows, in nats a token: coef is that of the first step, and
    after each it is multiplied by 1 + clip(kl / target - 1, -0.2, 0.2) * samples / horizon (arXiv 1909.08593); 0: the
    coefficient is fixed."""
    horizon: Annotated[
        int, Interval(ge=1, le=1_000_000_000), WITH_KL, KL_IN_LOSS, OnlyIf("algorithm.kl.target", but=(0,))
    ] = 10_000
    """Samples over which the coefficient changes by a factor of at most about 1.2."""


@dataclass(frozen=True)
class EntropyConfig:
    """Entropy of the predictions in the loss."""

    coef: Annotated[float, Interval(ge=-1_000, le=1_000)] = 0.0
    """Weight of the entropy bonus, in nats; 0: none."""
    top_share: Annotated[float, Interval(gt=0, le=1)] = 1.0
    """Share of the step's tokens, those of highest entropy, that the policy loss is kept for (arXiv 2506.01939)."""


@dataclass(frozen=True)
class AlgorithmConfig:
    """The RL objective: a preset by name, any field of it, or a class of your own."""

    name: str = "reinforce"
    """Preset, such as grpo or dapo, which sets all keys of the objective; or FILE.py:NAME, a class with the methods of
    flowrt.algorithms.algorithm.Algorithm."""
    advantage: Annotated[AdvantageConfig, WITH_TOKEN_LOSS] = field(default_factory=AdvantageConfig)
    """Advantages."""
    loss: Loss = field(default_factory=ReinforceLoss)
    """The policy loss of a token or a sample, and how losses become the loss of a step."""
    plan: PlanConfig = field(default_factory=PlanConfig)
    """Updates of a step."""
    correction: Annotated[CorrectionConfig, WITH_TOKEN_LOSS] = field(default_factory=CorrectionConfig)
    """Correction for stale samples."""
    kl: Annotated[KlConfig, WITH_TOKEN_LOSS] = field(default_factory=KlConfig)
    """The reference model."""
    entropy: Annotated[EntropyConfig, WITH_TOKEN_LOSS] = field(default_factory=EntropyConfig)
    """Entropy."""
    filter: FilterConfig = field(default_factory=FilterConfig)
    """Which groups are trained."""
    staleness_weight: Annotated[
        Literal["uniform", "polynomial"], WITH_TOKEN_LOSS, OnlyIf("max_staleness", but=(0,))
    ] = "uniform"
    """Loss weight of a sample by its staleness s; uniform: 1; polynomial: (1 + s) ** -staleness_power (FedAsync, arXiv
    1903.03934)."""
    staleness_power: Annotated[
        float, Interval(ge=0, le=100), OnlyIf("algorithm.staleness_weight", but=("uniform",))
    ] = 0.5
    """The exponent; 0: uniform."""
    own_reference: bool = False
    """Whether a class of your own needs the reference model; found out when the run starts."""


@dataclass(frozen=True)
class ControllerConfig:
    """The controller: addresses, keys, timeouts (in seconds) and transfers."""

    bind: str = "tcp://127.0.0.1:0"
    """Address the controller listens on; port 0: any free port; without keys, only loopback addresses are allowed."""
    host: str = ""
    """Host that workers connect to, if the controller listens on all interfaces (tcp://*:0); empty: detected."""
    keys: str = ""
    """Directory made by `flowrt keys`: only holders of its keys can connect; empty: $FLOWRT_KEYS, if set."""
    heartbeat_s: Seconds = 1.0
    """Interval between heartbeats of a worker."""
    worker_timeout_s: Seconds = 30.0
    """A worker that sends nothing for this long is removed from the run."""
    reconnect_timeout_s: Seconds = 60.0
    """How long workers keep their state and try to reconnect after the controller goes away."""
    worker_drain_timeout_s: Annotated[float, Interval(ge=0, le=MAX_TIMEOUT_S)] = 0.0
    """How long a worker that received SIGTERM completes its slots and serves the tensors it holds; 0: follows
    rollout.max_new_tokens, and is 30 s or more."""
    lease_s: Seconds = 600.0
    """How long a worker may hold a slot without progress of its work; after an expired lease the next worker gets twice
    as long."""
    request_timeout_s: Annotated[float, Interval(ge=0, le=MAX_TIMEOUT_S)] = 0.0
    """How long a worker waits for the reply to one request; 0: follows the samples of a step and
    of evaluations, rollout.max_new_tokens and the size of the model, and is an hour or more."""
    lanes: Literal["auto", "gloo", "shm", "nccl", "hccl"] = "auto"
    """Transport of tensors; auto: shared memory on one host, else nccl or hccl where devices
    are in use, else TCP (gloo)."""
    transfer_idle_timeout_s: Seconds = 60.0
    """A tensor transfer without progress for this long fails and is retried."""
    min_transfer_mb_per_s: Annotated[float, Interval(gt=0, le=1_000_000)] = 1.0
    """Minimum rate of a transfer after transfer_idle_timeout_s, in MB/s; a slower one fails; lower it for links below
    8 Mbit/s."""
    store_gb: Annotated[float, Interval(ge=0, le=1_000_000)] = 0.0
    """Maximum size of a worker's sample store, in GB; 0: unlimited."""
    no_progress_timeout_s: Seconds = 900.0
    """A run without progress for this long ends with exit code 3 and reports what each worker waits for; work that
    goes on (a decoded token, a pass, a file) is progress; keep it longer than lease_s."""
    connect_timeout_s: Seconds = 120.0
    """How long a worker tries to reach the controller, and how long the controller waits for the next role to join."""


@dataclass(frozen=True)
class TimelineConfig:
    """The timeline: what each worker did when, and what it waited for."""

    mb: Annotated[int, Interval(ge=32, le=100_000_000)] = 512
    """Size of the timeline on disk, in MB; over it the oldest parts are removed, but for the first."""


@dataclass(frozen=True)
class LaunchConfig:
    """Where `flowrt run` starts workers: each option is a command prefix, for example srun and its flags.

    $NAME in a prefix is replaced from the launcher's environment when a worker starts.
    """

    rollout: str = ""
    """Prefix of each rollout worker's command; empty: start it on this machine."""
    rollout_hosts: str = ""
    """Comma-separated hosts, assigned to rollout workers round-robin; $HOST in launch.rollout is the assigned one."""
    trainer: str = ""
    """Prefix of the trainer's command (of torchrun, if there are several ranks)."""
    auxiliary: str = ""
    """Prefix of the commands of source, reward and reference workers."""
    devices: str = "auto"
    """Comma-separated accelerators of this machine: one for each trainer rank, in order, then the others for rollout
    workers, round-robin; auto: all that are found; none: do not assign any."""
    use_fork_server: bool = True
    """Fork local workers from a process that has already imported torch (Linux without accelerators)."""


@dataclass(frozen=True)
class SupervisorConfig:
    """Restart of workers that die or hang. (A lost trainer is covered by max_run_restarts.)"""

    max_worker_restarts: RestartCount = 3
    """Restarts of one worker within window_s, after which the run ends with its error; 0: no restarts."""
    window_s: Annotated[Seconds, WITH_RESTARTS] = 300.0
    """Length of the window in which restarts are counted, in seconds."""
    backoff_s: Annotated[Seconds, WITH_RESTARTS] = 0.5
    """Delay before the first restart, in seconds; doubles with each further restart in the window, up to a minute."""
    hung_process_timeout_s: Seconds = 10.0
    """A local process is killed and replaced this long after its worker was removed from the run, in seconds; one whose
    worker never joined, controller.connect_timeout_s later."""
    join_report_s: Seconds = 30.0
    """A worker that has not joined this long after its process was started is reported on the terminal, in seconds;
    again after 4, 16, … times as long."""
    role_vacancy_timeout_s: Seconds = 60.0
    """The run ends when a role has had no worker for this long, in seconds."""


@dataclass(frozen=True)
class CheckpointConfig:
    """Checkpoints, from which a run is resumed."""

    every: StepCount = 50
    """Steps between checkpoints; the last step always writes one; 0: no checkpoints, a resumed run starts over."""
    keep: Annotated[int, Interval(gt=0, le=10_000_000), WITH_CHECKPOINTS_OR_MODELS] = 2
    """Number of newest checkpoints to keep, and of newest models of hf_every."""
    samples: bool = True
    """Keep what is generated in journals in the run directory, so that a resumed run trains complete samples, and
    continues those in generation, as far as the staleness bound allows."""
    hf_every: StepCount = 0
    """Steps between models in the format of Hugging Face, as step-N in "hf" in the run directory, whether or not there
    is a checkpoint of the same step; 0: none."""
    preemption_save_timeout_s: Annotated[float, Interval(ge=0, le=MAX_TIMEOUT_S), WITH_CHECKPOINTS] = 60.0
    """How long a run that received SIGTERM may make no progress with its checkpoint, in seconds; 0: end without
    saving."""
    best: Annotated[str, EVALUATES] = ""
    """Result of evaluations, as held_out/avg@1, by which the best weights are kept, in "best" in the run directory; the
    trainer keeps each evaluated version in memory until its results are known; empty: none."""
    keep_best: Annotated[int, Interval(gt=0, le=1_000), OnlyIf("checkpoint.best", but=("",))] = 1
    """Number of versions to keep there, best first."""


@dataclass(frozen=True)
class RecorderConfig:
    """Recording of all events of the controller, for `flowrt replay`."""

    mb: Annotated[int, Interval(ge=0, le=1_000_000)] = 1024
    """Maximum size of the recordings of the run, in MB; once it is reached the recording stops, and the run goes on;
    0: no recording."""


@dataclass(frozen=True)
class GuardConfig:
    """A guard: a rule on a metric, and what happens when it fires.

    In a file a table `[[guard]]` each, as a flag `--guard "METRIC above|below VALUE [relative=median] [window=N]
    [steps=N] [action=A] [hold_steps=N]"` or `--guard "METRIC off"`.
    """

    metric: str
    """Field of metrics.jsonl; a value that is not finite violates the rule too."""
    above: Limit = None
    """The metric violates the rule above this; exactly one of above and below."""
    below: Limit = None
    """The metric violates the rule below this."""
    relative: Literal["none", "median"] = "none"
    """median: above and below are multiples of the median of the metric in the window of steps before, once it is
    full, and while it is positive."""
    window: Annotated[int, Interval(ge=2, le=10_000)] = 50
    """Relative to a median: the number of steps before that it is taken over."""
    steps: Annotated[int, Interval(ge=1, le=10_000_000)] = 1
    """Consecutive steps with a violation before the rule fires; it fires again in each further one."""
    action: Literal["warn", "hold", "stop", "off"] = "warn"
    """warn: a line in the log, once in 50 steps; hold: a staleness bound of 0 for hold_steps steps; stop: save a
    checkpoint and end with exit code 5; off: no rule on this metric, of the defaults or given before."""
    hold_steps: Annotated[int, Interval(ge=1, le=10_000_000)] = 10
    """Action hold: steps with a staleness bound of 0, counted from the last firing."""


@dataclass(frozen=True)
class SamplesConfig:
    """Samples that are stored with their texts, in samples.sqlite in the run directory (see `flowrt samples`)."""

    per_step: Annotated[int, Interval(ge=0, le=MAX_LIVE_SAMPLES)] = 32
    """Samples per step, on average, in whole groups; those whose reward failed, up to 8 truncated ones, and answers of
    evaluations come in addition; 0: none at all."""
    mb: Annotated[int, Interval(ge=1, le=1_000_000), OnlyIf("samples.per_step", but=(0,))] = 256
    """Size of the file, in MB, from which samples of every second older step are deleted."""


@dataclass(frozen=True)
class GuardsConfig:
    """Guards in general; the rules are `[[guard]]`."""

    health: bool = True
    """Also warn of requests that wait for unusually long, of a disk that is nearly full, and of an evaluation that is
    clearly below its best twice in a row."""
    command: str = ""
    """Program and arguments, run when a guard fires, with the event as JSON on its input; it has 10 s."""


@dataclass(frozen=True)
class RunConfig:
    """One run: an RL objective with a strict staleness bound."""

    recipe: str = "arithmetic"
    """Recipe: the task and the defaults of the run, by name, as flowrt --help lists them; or FILE.py[:NAME], a task of
    your own."""
    recipe_sha256: str = ""
    """SHA-256 of the file of a task of your own; found out when the run starts."""
    input_digests: tuple[str, ...] = ()
    """Digest and path of the data sets and of the files of reward functions; found out when the run starts."""
    seed: Annotated[int, Interval(ge=0, le=MAX_INT64)] = 0
    """Seed of the model, the data order and the sampling."""
    steps: Annotated[int, Interval(gt=0, le=10_000_000)] = 150
    """Number of optimiser steps."""
    prompts_per_step: Annotated[int, Interval(gt=0, le=MAX_LIVE_SAMPLES)] = 16
    """Prompts (groups) per optimiser step."""
    group_size: Annotated[int, Interval(gt=0, le=65_536)] = 8
    """Samples per prompt."""
    on_lost_sample: Literal["regenerate", "drop_group", "train_remaining"] = "regenerate"
    """If a sample to train on is lost: generate it again, drop its group, or train on the remaining samples."""
    max_staleness: Annotated[int, Interval(ge=0, le=10_000)] = 1
    """Maximum staleness of a trained sample, in weight versions; 0: synchronous training."""
    deterministic: bool = False
    """Fix batch shapes and order; at max_staleness 0 a run is then bitwise reproducible, but slower."""
    model: str = ""
    """Directory of the Hugging Face causal language model to start from, or of a LoRA adapter of one; empty: the
    embedded model."""
    model_overrides: Annotated[str, OnlyIf("model", but=("",))] = ""
    """Fields in place of those of the model's config.json, as a JSON object, for every worker, reference.model and the
    exported model: '{"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}}';
    empty: none."""
    device: Device = ""
    """Device of trainer, rollout and reference workers without one of their own; auto: an accelerator if present, else
    cpu; empty: the default of each engine, which is cpu for torch."""
    run_dir: str = ""
    """Run directory; empty: runs/ and the start time."""
    threads: Annotated[int, Interval(gt=0, le=1_024)] = 1
    """CPU threads of torch in each worker."""
    max_run_restarts: RestartCount = 3
    """Restarts of a local run from its last checkpoint after a trainer is lost, within run_restart_window_s."""
    run_restart_window_s: Annotated[Seconds, OnlyIf("max_run_restarts", but=(0,))] = 86_400.0
    """Length of the window in which restarts of a run are counted, in seconds: after a healthy day all are left."""
    dispatch: DispatchOrder = field(default_factory=FifoDispatch)
    """Which worker gets which ready samples."""
    guard: tuple[GuardConfig, ...] = ()
    """Guards, in addition to those that every run has: tables `[[guard]]`, or flags `--guard "METRIC above VALUE"`."""
    guards: GuardsConfig = field(default_factory=GuardsConfig)
    """What is done when a guard fires."""
    exporters: tuple[str, ...] = ()
    """Exporters that `flowrt run` starts, each a process of its own: tensorboard, wandb, FILE.py:CLASS."""
    curriculum: CurriculumOptions = field(default_factory=UniformCurriculum)
    """Which prompts are sampled in an epoch, by the rewards of their earlier groups."""
    data: DataConfig = field(default_factory=DataConfig)
    """Prompts."""
    reward: RewardOptions = field(default_factory=RewardOptions)
    """Reward functions."""
    eval: EvalConfig = field(default_factory=EvalConfig)
    """Evaluation."""
    build: Annotated[BuildConfig, EMBEDDED] = field(default_factory=BuildConfig)
    """The embedded model."""
    sft: Annotated[SftConfig, EMBEDDED] = field(default_factory=SftConfig)
    """Supervised fine-tuning of the embedded model before RL."""
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    """Rollout workers."""
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    """The trainer."""
    reference: ReferenceConfig = field(default_factory=ReferenceConfig)
    """Reference workers."""
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    """The RL objective."""
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    """Checkpoints."""
    samples: SamplesConfig = field(default_factory=SamplesConfig)
    """Stored samples."""
    controller: ControllerConfig = field(default_factory=ControllerConfig)
    """The controller."""
    recorder: RecorderConfig = field(default_factory=RecorderConfig)
    """Recording for `flowrt replay`."""
    timeline: TimelineConfig = field(default_factory=TimelineConfig)
    """What each worker did when."""
    supervisor: SupervisorConfig = field(default_factory=SupervisorConfig)
    """Restart of workers."""
    launch: LaunchConfig = field(default_factory=LaunchConfig)
    """Placement of workers on hosts and devices."""

    @property
    def longest_response(self) -> int:
        """The maximum length of the responses of the run, those of evaluations among them, in tokens."""
        return max(self.rollout.max_new_tokens, self.eval.max_new_tokens)


def _range(low: float | None, high: float | None) -> tuple[float, float]:
    """Two limits, infinite where they are not given."""
    return -math.inf if low is None else low, math.inf if high is None else high


def key_values(table: Any, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """The dotted name, the type hint and the value of each key of a table and of those within it."""
    hints = get_type_hints(type(table), include_extras=True)
    for attribute in fields(table):
        name, value = f"{path}{attribute.name}", getattr(table, attribute.name)
        if is_dataclass(value):
            yield from key_values(value, f"{name}.")
        else:
            yield name, hints[attribute.name], value


def changed(config: Table, values: Mapping[str, Any]) -> Table:
    """The configuration, or a table of it, with these values, by the dotted names of their keys."""
    table: Any = config
    for name, value in values.items():
        head, _, rest = name.partition(".")
        table = replace(table, **{head: changed(getattr(table, head), {rest: value}) if rest else value})
    result: Table = table
    return result
