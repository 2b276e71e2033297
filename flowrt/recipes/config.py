"""A complete, typed configuration of a run. Parsed once, by the controller's side; workers receive it."""

from dataclasses import dataclass, field
from typing import Annotated, Literal

import tyro

from flowrt.engines.options import FsdpOptions, LoraOptions, SglangOptions, TrainOptions


@dataclass(frozen=True)
class DataConfig:
    """Where problems come from."""

    path: Annotated[str, tyro.conf.arg(aliases=["--data"])] = ""
    """JSON Lines (or parquet) file with one problem a row; recipes that generate their problems take none."""
    prompt_field: str = "question"
    """Field of a row that holds the problem."""
    answer_field: str = "answer"
    """Field of a row that holds the solution; the reward looks at its final answer."""
    reward: str = ""
    """Recipe own: FILE.py:FUNCTION, called with a response and its prompt's answer, both text; gives a number."""
    epochs: int = 0
    """Passes over the data before the run ends early; 0: as many as the steps need."""
    eval_prompts: int = 256
    """Held-out problems, answered greedily before and after training; 0: none."""


@dataclass(frozen=True)
class BuildConfig:
    """The embedded model (a Qwen3 decoder) that is built when no --model is given."""

    hidden_size: int = 128
    """Width of the residual stream."""
    layers: int = 5
    """Number of decoder layers."""
    heads: int = 4
    """Attention heads; half as many key-value heads."""
    intermediate_size: int = 384
    """Width of the feed-forward layers."""
    vocab_size: int = 1024
    """Size of the byte-level BPE vocabulary, for recipes that train a tokenizer."""
    max_length: int = 512
    """Longest sequence, prompt and response together, in tokens."""


@dataclass(frozen=True)
class WarmStartConfig:
    """Supervised training of the embedded model before RL; a model given by --model is taken as it is."""

    steps: int = 140
    """Optimiser steps on worked solutions, at most; 0: no warm start."""
    batch: int = 32
    """Solutions a step."""
    lr: float = 2e-3
    """Learning rate."""
    probes: int = 256
    """Problems answered at each look at the mean reward."""
    until: float = 0.85
    """Stop early when the mean reward of sampled answers reaches this."""
    bare_steps: int = 40
    """Steps of a second phase, at most, on a corpus of mostly bare answers without their working; 0: none."""
    bare_lr: float = 1e-3
    """Learning rate of the second phase."""
    bare_until: float = 0.25
    """Stop the second phase when the mean reward of sampled answers has fallen to this."""


@dataclass(frozen=True)
class RefreshConfig:
    """When rollout workers take newer weights (the staleness bound holds whatever this says)."""

    policy: Literal["each", "rolling", "every", "divergence"] = "each"
    """Each version; some workers at a time; every so many versions; or when the policy has moved away far enough."""
    at_once: int = 1
    """For rolling: workers that fetch or swap at a time."""
    versions: int = 2
    """For every: versions between two refreshes."""
    threshold: float = 1e-3
    """For divergence: nats per token (k3) between what a worker generates with and what the trainer has."""
    max_age: int = 4
    """For divergence: a worker so many versions behind takes the latest however near it is."""


@dataclass(frozen=True)
class RolloutConfig:
    """Generation."""

    engine: Literal["torch", "sglang"] = "torch"
    """Plain PyTorch within the worker, or an SGLang server of the worker's own (or one that is running)."""
    workers: int = 2
    """Rollout workers."""
    rows: int = 64
    """Sequences that one worker generates at a time."""
    max_new_tokens: int = 16
    """Longest response, in tokens."""
    temperature: float = 1.0
    """Sampling temperature."""
    swap: Literal["boundary", "inflight"] = "boundary"
    """When new weights are put into use: between sequences, or between two tokens of those that run."""
    recompute: bool = True
    """In flight: keys and values of what runs are computed again, beside generation (else those of before stay)."""
    compile: bool = False
    """Compile decode steps with torch.compile: they are faster after a start that takes up to a minute longer."""
    refresh: RefreshConfig = field(default_factory=RefreshConfig)
    """When newer weights are taken."""
    sglang: SglangOptions = field(default_factory=SglangOptions)
    """The SGLang server."""


@dataclass(frozen=True)
class TrainerConfig(TrainOptions):
    """Training."""

    engine: Literal["torch", "fsdp"] = "torch"
    """Each rank has a whole model (torch), or parameters, gradients and optimiser are in shards over them (fsdp)."""
    ranks: int = 1
    """Data-parallel trainer processes; two or more are started under torchrun."""
    ranks_s: float = 240.0
    """How long a rank waits for one that gives no sign, before the run goes back to a checkpoint; below stall_s."""
    nodes: int = 1
    """Hosts that the ranks are spread over evenly; launch.trainer starts one torchrun on each."""
    micro_batch_tokens: int = 2048
    """A trainer starts on a micro-batch as soon as it has this many tokens (or the rest of the step)."""
    step_tokens: int = 0
    """Train exactly so many response tokens a step (C3PO, arXiv 2506.14731), chosen by a seeded shuffle; 0: all."""
    balanced: bool = False
    """Share each step among the ranks by tokens beforehand, not on demand; gives up streaming within the step."""
    save: bool = True
    """Write the trained model."""
    final_dir: str = ""
    """Where the trained model is written, on the host of trainer rank 0; empty: final in the run directory."""
    fsdp: FsdpOptions = field(default_factory=FsdpOptions)
    """The fsdp engine."""
    lora: LoraOptions = field(default_factory=LoraOptions)
    """Low-rank adapters in place of training all weights (fsdp engine)."""


@dataclass(frozen=True)
class LossConfig:
    """GRPO (DeepSeekMath, arXiv 2402.03300) with clip-higher (DAPO, arXiv 2503.14476)."""

    clip_low: float = 0.2
    """Lower clip range of the probability ratio."""
    clip_high: float = 0.28
    """Upper clip range of the probability ratio."""
    kl_coef: float = 1e-3
    """Weight of the k3 divergence to the reference; at 0 no reference worker starts."""
    correction_cap: float = 2.0
    """Cap of the importance weight between trainer and rollout log-probabilities."""
    normalize: bool = True
    """Divide a group's advantages by its standard deviation."""


@dataclass(frozen=True)
class ControllerConfig:
    """Addresses and deadlines."""

    bind: str = "tcp://127.0.0.1:0"
    """Where the controller listens; port 0 takes any free one (without keys: on this machine only)."""
    host: str = ""
    """Name or address by which workers find a controller that listens on all (tcp://*:0); empty: it is looked up."""
    keys: str = ""
    """Directory that `flowrt keys` made: only its keys may take part in the run (else FLOWRT_KEYS)."""
    heartbeat_s: float = 1.0
    """How often a worker says that it is there."""
    silence_s: float = 30.0
    """A worker not heard of for this long is gone."""
    return_s: float = 60.0
    """How long workers wait for a controller that went away; they keep what they have meanwhile."""
    drain_s: float = 30.0
    """How long a worker that is terminated (SIGTERM) stays for those that need what it holds."""
    lease_s: float = 600.0
    """How long a worker may work on a slot; one that was not done in time gets twice that with the next worker."""
    wait_s: float = 3600.0
    """How long a worker waits for one answer before it gives up."""
    lanes: str = "auto"
    """How tensors move: auto (shared memory on one host, else by devices already in use, else TCP), or gloo, shm,
    nccl or hccl."""
    lane_s: float = 60.0
    """A transfer of tensors on which nothing moved for this long has failed, and is made again."""
    lane_mb_per_s: float = 1.0
    """A transfer slower than this, once it has had lane_s, has failed too; lower it for links below 8 Mbit/s."""
    store_gb: float = 0.0
    """Most gigabytes of samples that one worker keeps in memory; 0: no limit."""
    stall_s: float = 900.0
    """A run without any progress for this long ends, saying who waits for what; keep it longer than lease_s."""
    join_s: float = 120.0
    """How long a worker looks for its controller."""


@dataclass(frozen=True)
class LaunchConfig:
    """Where `flowrt run` starts workers: each command is put behind these words, for example srun and its flags.

    $NAME in them is what that is in the launcher's environment when workers start.
    """

    rollout: str = ""
    """Words before each rollout worker's command; empty: it runs on this machine."""
    rollout_hosts: str = ""
    """Hosts, by commas: $HOST in launch.rollout is the first for the first worker, and so on, round and round."""
    trainer: str = ""
    """Words before the trainer's command (torchrun, where there are several ranks)."""
    others: str = ""
    """Words before the commands of source, reward and reference."""
    devices: str = "auto"
    """Accelerators of this machine, by commas: a trainer rank each for the first, rollout workers go round the others;
    auto: those that there are; none: every worker sees all of them."""
    forked: bool = True
    """Workers of this machine are forked from a process that has imported torch once (Linux without accelerators)."""


@dataclass(frozen=True)
class SupervisorConfig:
    """What becomes of workers that die. (A trainer's death is another matter: it takes the model along.)"""

    restarts: int = 3
    """How often one worker is started again within window_s before the run ends with its error; 0: never."""
    window_s: float = 300.0
    """Starts longer ago than this are forgotten."""
    backoff_s: float = 0.5
    """Wait before the first new start; it doubles with each that follows."""
    hung_s: float = 10.0
    """A worker on this machine whose process outlives its place in the run for this long is killed, and replaced; one
    that has never come, controller.join_s later."""
    absence_s: float = 60.0
    """A role without any worker for this long ends the run."""


@dataclass(frozen=True)
class CheckpointConfig:
    """What a run can be resumed from."""

    every: int = 50
    """Steps between checkpoints, of which the last step always is one; 0: none, a resumed run starts anew."""
    keep: int = 2
    """The newest so many are kept."""
    drain_s: float = 60.0
    """How long a run that is terminated (SIGTERM) may take to save what it has trained; 0: it ends without that."""


@dataclass(frozen=True)
class RunConfig:
    """One run: GRPO with a strict staleness bound."""

    recipe: str = "arithmetic"
    """What is learned: arithmetic, gsm8k, or own (your prompts and reward)."""
    seed: int = 0
    """Seed of the model, the data order and every sample."""
    steps: int = 150
    """Optimiser steps."""
    prompts_per_step: int = 16
    """Prompts (groups) trained on in one step."""
    group_size: int = 8
    """Samples of each prompt."""
    lost_member: Literal["refill", "drop", "rest"] = "refill"
    """A group that lost a sample: make the sample again, drop the group, or train the rest of it."""
    staleness: int = 1
    """Most versions that a trained sample may be behind the weights it trains; 0: the synchronous loop."""
    deterministic: bool = False
    """Fix batch shapes and order, so that a run repeats bit for bit (at staleness 0); slower."""
    model: str = ""
    """Directory of a Hugging Face causal LM to start from; empty: the embedded model."""
    run_dir: str = ""
    """Where the run is written; empty: runs/ and the time of the start."""
    threads: int = 1
    """CPU threads of each worker's torch."""
    restarts: int = 3
    """How often a local run goes back to its last checkpoint by itself when a trainer is lost."""
    data: DataConfig = field(default_factory=DataConfig)
    """Where problems come from."""
    build: BuildConfig = field(default_factory=BuildConfig)
    """The embedded model."""
    warm_start: WarmStartConfig = field(default_factory=WarmStartConfig)
    """Supervised training of the embedded model before RL."""
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    """Generation."""
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    """Training."""
    loss: LossConfig = field(default_factory=LossConfig)
    """The loss."""
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    """What a run can be resumed from."""
    controller: ControllerConfig = field(default_factory=ControllerConfig)
    """Addresses and deadlines."""
    supervisor: SupervisorConfig = field(default_factory=SupervisorConfig)
    """What becomes of workers that die."""
    launch: LaunchConfig = field(default_factory=LaunchConfig)
    """Workers on other hosts."""
