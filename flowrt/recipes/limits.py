"""The range of every number of a configuration."""

import shlex
from operator import attrgetter
from string import Template

from flowrt.errors import ConfigError
from flowrt.recipes.config import RunConfig, TrainerConfig

ABOVE_ZERO = (
    "steps",
    "prompts_per_step",
    "group_size",
    "threads",
    "checkpoint.keep",
    "build.hidden_size",
    "build.layers",
    "build.heads",
    "build.intermediate_size",
    "build.vocab_size",
    "build.max_length",
    "warm_start.batch",
    "warm_start.probes",
    "rollout.workers",
    "rollout.rows",
    "rollout.max_new_tokens",
    "rollout.temperature",
    "rollout.sglang.start_s",
    "rollout.sglang.request_s",
    "rollout.sglang.update_s",
    "trainer.ranks",
    "trainer.nodes",
    "trainer.micro_batch_tokens",
    "trainer.forward_tokens",
    "trainer.max_grad_norm",
    "trainer.fsdp.file_gb",
    "controller.heartbeat_s",
    "controller.silence_s",
    "controller.return_s",
    "controller.drain_s",
    "controller.lease_s",
    "controller.lane_s",
    "controller.lane_mb_per_s",
    "controller.wait_s",
    "controller.stall_s",
    "trainer.ranks_s",
    "controller.join_s",
    "supervisor.window_s",
    "supervisor.backoff_s",
    "supervisor.hung_s",
    "supervisor.absence_s",
)
ZERO_OR_ABOVE = (
    "restarts",
    "checkpoint.every",
    "checkpoint.drain_s",
    "data.epochs",
    "data.eval_prompts",
    "warm_start.steps",
    "warm_start.bare_steps",
    "warm_start.lr",
    "warm_start.bare_lr",
    "rollout.sglang.restarts",
    "trainer.lr",
    "trainer.warmup_steps",
    "trainer.weight_decay",
    "trainer.decay_steps",
    "trainer.min_lr",
    "trainer.lora.rank",
    "trainer.step_tokens",
    "loss.clip_low",
    "loss.clip_high",
    "loss.kl_coef",
    "controller.store_gb",
    "supervisor.restarts",
)
LANES = ("auto", "gloo", "shm", "nccl", "hccl")
DEVICES = ("auto", "cpu", "cuda", "npu")
BELOW_ONE = ("trainer.beta1", "trainer.beta2")


def check_limits(config: RunConfig) -> None:
    """Raises ConfigError for the first number outside its range (not-a-number is outside every one)."""
    for name in ABOVE_ZERO:
        value = attrgetter(name)(config)
        if not value > 0:
            raise ConfigError(f"{name} is {value}; use a value above 0")
    for name in ZERO_OR_ABOVE:
        value = attrgetter(name)(config)
        if not value >= 0:
            raise ConfigError(f"{name} is {value}; use 0 or more")
    for name in BELOW_ONE:
        value = attrgetter(name)(config)
        if not 0 <= value < 1:
            raise ConfigError(f"{name} is {value}; use 0 or more, and less than 1")
    if not config.loss.correction_cap >= 1:
        raise ConfigError(f"loss.correction_cap is {config.loss.correction_cap}; use 1 or more")
    check_trainer(config.trainer)
    check_published(config)
    times = config.controller
    if times.lanes not in LANES:
        raise ConfigError(f"controller.lanes is {times.lanes!r}; use one of {', '.join(LANES)}")
    if times.silence_s <= times.heartbeat_s:
        raise ConfigError(
            f"controller.silence_s is {times.silence_s}, no longer than heartbeat_s ({times.heartbeat_s}): workers "
            "would count as gone between heartbeats; make it several times as long"
        )
    _check_hosts(config)


def check_trainer(trainer: TrainerConfig) -> None:
    """Raises ConfigError for what a training engine cannot do."""
    if trainer.fsdp.device not in DEVICES:
        raise ConfigError(f"trainer.fsdp.device is {trainer.fsdp.device!r}; use one of {', '.join(DEVICES)}")
    if trainer.engine == "torch" and trainer.lora.rank:
        raise ConfigError("trainer.lora.rank is set, but the torch engine has no adapters; use --trainer.engine fsdp")
    if trainer.compile and trainer.fsdp.recompute:
        raise ConfigError(
            "trainer.compile changes nothing with trainer.fsdp.recompute, which runs layers as they are; leave out one"
        )
    if trainer.min_lr > trainer.lr:
        raise ConfigError(f"trainer.min_lr is {trainer.min_lr}, above trainer.lr ({trainer.lr}), from which it falls")


def check_published(config: RunConfig) -> None:
    """Raises ConfigError when rollouts cannot take what the trainer publishes."""
    trainer = config.trainer
    adapters = trainer.engine == "fsdp" and trainer.lora.rank and trainer.lora.publish == "adapters"
    if config.rollout.engine == "sglang" and adapters:
        raise ConfigError("rollouts on SGLang take whole weights; use --trainer.lora.publish merged")


def _check_hosts(config: RunConfig) -> None:
    trainer = config.trainer
    if trainer.ranks % trainer.nodes:
        raise ConfigError(
            f"trainer.ranks is {trainer.ranks}, which trainer.nodes ({trainer.nodes}) does not divide: each host runs "
            "as many ranks as any other; change one of them"
        )
    if trainer.nodes > 1 and not config.launch.trainer:
        raise ConfigError(
            f"trainer.nodes is {trainer.nodes}, and launch.trainer is empty, so all ranks would start on this machine; "
            f"set it to what starts a command on each of {trainer.nodes} hosts, srun --ntasks-per-node=1 for example"
        )
    for name in ("rollout", "trainer", "others"):
        words = getattr(config.launch, name)
        try:
            shlex.split(words)
        except ValueError as error:
            raise ConfigError(f"launch.{name} cannot be cut into words ({error}): {words!r}; mind the quotes") from None
    if config.launch.rollout_hosts and "HOST" not in Template(config.launch.rollout).get_identifiers():
        raise ConfigError(
            f"launch.rollout_hosts is {config.launch.rollout_hosts!r}, and launch.rollout has no $HOST for them: "
            f"{config.launch.rollout!r}; put it where the host belongs, as in 'ssh $HOST'"
        )
    if not all(name.strip() for name in config.launch.devices.split(",")):
        raise ConfigError(
            f"launch.devices is {config.launch.devices!r}; use auto, none, or devices by commas, as in 0,1,2"
        )
