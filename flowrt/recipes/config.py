"""The configuration of a run: parsed once on the controller's side and sent to every worker.

- Every number has its bounds on its field; constraints between fields are in `flowrt.recipes.constraints`.
- The text below a field is its help text and its row in docs/reference/configuration.md.
"""

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
    StepCount,
    TrainerSettings,
)
from flowrt.engines.registry import RolloutEngineName, TrainEngineName
from flowrt.recipes.algorithm_config import MAX_LIVE_SAMPLES, AlgorithmConfig
from flowrt.recipes.data_config import EVALUATES, READS_FILES, DataConfig, EvalConfig
from flowrt.rewards.options import RewardOptions
from flowrt.runtime.bounds import MAX_INT64, MAX_TIMEOUT_S, Limit, Reward, Seconds
from flowrt.runtime.conditions import OnlyIf

Table = TypeVar("Table")
EMBEDDED = OnlyIf("model", have=("",), off=(0,))
WITH_SFT = OnlyIf("sft.steps", but=(0,))
WITH_ANSWERS = OnlyIf("sft.answer_only_steps", but=(0,))
WITH_ANY_SFT = OnlyIf("sft.steps", but=(0,), or_keys=("sft.answer_only_steps",))
SEVERAL_RANKS = OnlyIf("trainer.ranks", but=(1,))
WITH_CHECKPOINTS = OnlyIf("checkpoint.every", but=(0,), off=(0.0,))
WITH_CHECKPOINTS_OR_MODELS = OnlyIf("checkpoint.every", but=(0,), or_keys=("checkpoint.hf_every",))
WITH_RESTARTS = OnlyIf("supervisor.max_worker_restarts", but=(0,))
BY_TOKENS = OnlyIf("trainer.micro_batch_samples", have=(0,))


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


DispatchConfig = FifoDispatch | LengthAwareDispatch


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


CurriculumConfig = UniformCurriculum | SolveRateCurriculum


@dataclass(frozen=True)
class RolloutConfig(RolloutSettings):
    """Rollout workers: generation of responses."""

    engine: RolloutEngineName = "torch"
    """Engine torch: PyTorch inside the worker; sglang, vllm: a server that the worker starts or connects to."""
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
    dispatch: DispatchConfig = field(default_factory=FifoDispatch)
    """Which worker gets which ready samples."""
    guard: tuple[GuardConfig, ...] = ()
    """Guards, in addition to those that every run has: tables `[[guard]]`, or flags `--guard "METRIC above VALUE"`."""
    guards: GuardsConfig = field(default_factory=GuardsConfig)
    """What is done when a guard fires."""
    exporters: tuple[str, ...] = ()
    """Exporters that `flowrt run` starts, each a process of its own: tensorboard, wandb, FILE.py:CLASS."""
    curriculum: CurriculumConfig = field(default_factory=UniformCurriculum)
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
