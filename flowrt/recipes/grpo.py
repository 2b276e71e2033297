"""The dataflow of GRPO: columns, the stages that need and make them, and the policies.

::

    source    offers   prompt, answer                                   (group columns)
    rollout   needs    prompt                            makes response, logprobs, truncated
    reward    needs    response, answer, truncated       makes reward
    reference needs    prompt, response                  makes ref_logprobs        (training only)
    train     needs    all of these, for all samples of a group                    (training only)
    evaluate  needs    reward, truncated                                           (evaluation only)

`reward` and `reference` run concurrently: a stage is ready once the columns it needs exist. ``truncated`` is 1 for a
response that was cut at the length limit, else 0. With top-k, top-p or min-p sampling the rollout stage also makes
``support``, ``support_counts`` (the tokens that could be drawn at each position, which the trainer needs) and
``support_size`` (their mean number, a metric). With ``reference.refresh`` the reference stage also makes
``reference_version``, the step of the weights that scored the sample (a metric). With ``reward.functions`` the reward
stage also makes the value of each function and how calls failed (metrics). With ``algorithm.filter.function`` the
reward worker also runs a stage ``filter``, which needs the rewards of a whole group and makes ``filter_decision``.
Unless ``samples.per_step`` is 0 the reward stage also needs ``prompt``, whose text is stored.
"""

import dataclasses

from flowrt.controller.core import Core
from flowrt.controller.policies.admission import StrictLag
from flowrt.controller.policies.batching import Batcher, FixedTokens, SampleCount, TokenBudget
from flowrt.controller.policies.curriculum import Curriculum, EveryPrompt, SolveRate
from flowrt.controller.policies.dispatch.base import Dispatch, Fifo
from flowrt.controller.policies.dispatch.length_aware import DecodeCost, LengthAware
from flowrt.controller.policies.group_filter import (
    DECISION,
    AllOf,
    GroupFilter,
    KeepAll,
    RewardBand,
    UserFunction,
    ZeroVariance,
)
from flowrt.controller.policies.rank_balancing import Balanced, OnDemand
from flowrt.controller.policies.weight_sync import DelayedUpdate, Divergence, EveryN, Rolling, WeightSyncPolicy
from flowrt.controller.settings import Dataflow, OnLostSample, Policies, Settings
from flowrt.controller.storage.recording_format import CoreInputs
from flowrt.ids import REFERENCE, REWARD, ROLLOUT, SOURCE, TRAINER, UNSCORED
from flowrt.protocol.messages import Column, Stage
from flowrt.recipes.algorithm_config import FilterConfig
from flowrt.recipes.algorithms import needs_reference
from flowrt.recipes.config import (
    DivergenceSync,
    EveryNSync,
    FifoDispatch,
    RollingSync,
    RunConfig,
    TrainerConfig,
    UniformCurriculum,
    WeightSync,
)
from flowrt.recipes.data_sets import set_names
from flowrt.recipes.guards import guard_rules
from flowrt.recipes.model_files import weight_files
from flowrt.recipes.open_work import evaluated_answers, open_samples
from flowrt.recipes.run_dir import model_dir
from flowrt.rewards.scoring import reward_columns
from flowrt.runtime import time_limits

POLICY = "policy"
TRAIN, EVAL = "train", "eval"
"""The two flows: groups for training, and groups for evaluation, which are only scored."""


def dataflow(config: RunConfig) -> Dataflow:
    """Columns and stages; a reference stage only if the algorithm needs it, a filter stage with a filter function."""
    with_reference = needs_reference(config.algorithm)
    with_support = config.rollout.truncation.is_active
    columns = [
        Column("prompt", "int32", "group"),
        Column("answer", "uint8", "group"),
        Column("response", "int32", "slot"),
        Column("logprobs", "float32", "slot"),
    ]
    makes = ["response", "logprobs", "truncated"]
    train_needs = ["prompt", "response", "logprobs", "truncated", "reward"]
    if with_support:
        columns += [Column("support", "int32", "slot"), Column("support_counts", "int32", "slot")]
        makes += ["support", "support_counts", "support_size"]
        train_needs += ["support", "support_counts"]
    unscored = (UNSCORED,) if config.reward.functions else ()
    train_needs += unscored
    reward_needs = ("response", "answer", "truncated", *(("prompt",) if config.samples.per_step else ()))
    stages = [
        Stage("rollout", needs=("prompt",), makes=tuple(makes), generates=True),
        Stage(
            "reward",
            needs=reward_needs,
            makes=("reward", *reward_columns(config.reward)),
            whole_groups=bool(config.reward.of_groups),
        ),
        Stage("evaluate", needs=("reward", "truncated", *unscored), makes=(), flow=EVAL),
    ]
    if with_reference:
        columns.append(Column("ref_logprobs", "float32", "slot"))
        scores = ("ref_logprobs", "reference_version") if config.reference.refresh else ("ref_logprobs",)
        stages.append(Stage("reference", needs=("prompt", "response"), makes=scores, flow=TRAIN))
        train_needs.append("ref_logprobs")
    if config.algorithm.filter.function:
        needs = ("reward", *unscored)
        stages.append(Stage("filter", needs=needs, makes=(DECISION,), flow=TRAIN, whole_groups=True))
        train_needs.append(DECISION)
    stages.append(Stage("train", needs=tuple(train_needs), makes=(), flow=TRAIN, whole_groups=True))
    return Dataflow(
        columns=tuple(columns),
        stages=tuple(stages),
        train_stage="train",
        train_flow=TRAIN,
        token_columns=("prompt", "response"),
    )


def core(config: RunConfig, inputs: CoreInputs) -> Core:
    """The core of a controller of this run; two cores of equal inputs return the same commands to the same events."""
    given = dataclasses.replace(
        settings(config),
        position=inputs.position,
        journals=inputs.journals,
        journals_unfinished=config.rollout.journal_s > 0 and not config.deterministic,
    )
    return Core(
        settings=given,
        flow=dataflow(config),
        policies=policies(config),
        term=inputs.term,
        recovered=inputs.recovered,
        outcomes=inputs.outcomes,
        kept=inputs.kept,
    )


def policies(config: RunConfig) -> Policies:
    """The controller's policies."""
    return Policies(
        admission=StrictLag(config.max_staleness),
        dispatch=dispatch(config),
        batcher=batcher(config.trainer),
        weight_sync=weight_sync(config.rollout.weight_sync),
        rank_balancing=Balanced(config.trainer.ranks) if config.trainer.balance_ranks_by_tokens else OnDemand(),
        tokens_per_step=FixedTokens(config.trainer.tokens_per_step, config.seed)
        if config.trainer.tokens_per_step
        else None,
        group_filter=group_filter(config.algorithm.filter),
        curriculum=curriculum(config),
        guards=guard_rules(config),
    )


def group_filter(config: FilterConfig) -> GroupFilter:
    """The policy that decides which groups are trained."""
    filters: list[GroupFilter] = [ZeroVariance()] if config.zero_variance else []
    low, high = config.rewards
    if (low, high) != FilterConfig().rewards:
        filters.append(RewardBand(low, high))
    if config.function:
        filters.append(UserFunction())
    if len(filters) > 1:
        return AllOf(tuple(filters))
    return filters[0] if filters else KeepAll()


def curriculum(config: RunConfig) -> Curriculum:
    """The policy that decides which prompts are sampled in an epoch."""
    options = config.curriculum
    if isinstance(options, UniformCurriculum):
        return EveryPrompt()
    return SolveRate(
        history=options.history,
        floor=options.floor,
        failed_reward=options.failed_reward,
        solved_reward=options.solved_reward,
        seed=config.seed,
        prior=options.prior,
        group_size=max(config.group_size, 2),  # group_size 1 counts as 2
    )


def dispatch(config: RunConfig) -> Dispatch:
    """The policy that decides which worker gets which ready samples."""
    options = config.dispatch
    if isinstance(options, FifoDispatch):
        return Fifo()
    cost = DecodeCost(1.0, options.row_cost)  # relative: only the ratio of the two matters
    return LengthAware(cost, config.prompts_per_step * config.group_size, options.tail_fraction)


def batcher(config: TrainerConfig) -> Batcher:
    """The policy that decides when a micro-batch is full."""
    return (
        SampleCount(config.micro_batch_samples)
        if config.micro_batch_samples
        else TokenBudget(config.micro_batch_tokens)
    )


def weight_sync(config: WeightSync) -> WeightSyncPolicy:
    """The policy that decides which workers receive a new version of the weights, and when."""
    match config:
        case RollingSync():
            return Rolling(config.max_concurrent)
        case EveryNSync():
            return EveryN(config.interval)
        case DivergenceSync():
            return Divergence(config.threshold, config.max_age)
    return DelayedUpdate()


def request_timeout_s(config: RunConfig) -> float:
    """How long a worker waits for the reply to one request, in seconds.

    A trainer waits for the evaluation before training, and other workers for the trainer.
    """
    if config.controller.request_timeout_s:
        return config.controller.request_timeout_s
    samples, rows, length = open_samples(config)
    path = model_dir(config)
    model_bytes = sum(file.stat().st_size for file in weight_files(path)) if path.is_dir() else 0
    tokens = config.prompts_per_step * config.group_size * length
    step_s = config.algorithm.plan.epochs * time_limits.pass_s(tokens, model_bytes) + time_limits.state_s(model_bytes)
    return time_limits.request_s(samples + evaluated_answers(config), rows, config.longest_response, step_s)


def settings(config: RunConfig) -> Settings:
    """The controller's settings: sizes, roles, timeouts. Times are in seconds."""
    only_evaluates = config.eval.only
    references = [REFERENCE] if needs_reference(config.algorithm) and not only_evaluates else []
    return Settings(
        steps=config.steps,
        groups_per_step=config.prompts_per_step,
        data_sets=set_names(config.data),
        completing_roles=(SOURCE,) if only_evaluates else (SOURCE, TRAINER),
        critical_roles=() if only_evaluates else (TRAINER,),
        replaceable_roles=(SOURCE, ROLLOUT, REWARD, *references),
        role_vacancy_timeout_s=config.supervisor.role_vacancy_timeout_s,
        checkpointing_roles=(TRAINER,),
        source_roles=(SOURCE,),
        preemption_save_timeout_s=config.checkpoint.preemption_save_timeout_s,
        model=POLICY,
        strict_issue_order=config.deterministic,
        on_lost_sample=OnLostSample(config.on_lost_sample),
        filter_tries=config.algorithm.filter.tries,
        lease_s=config.controller.lease_s,
        worker_timeout_s=config.controller.worker_timeout_s,
        rejoin_timeout_s=config.controller.worker_timeout_s,
        reconnect_timeout_s=config.controller.reconnect_timeout_s,
        lanes=config.controller.lanes,
        transfer_idle_timeout_s=config.controller.transfer_idle_timeout_s,
        min_transfer_mb_per_s=config.controller.min_transfer_mb_per_s,
        store_bytes=int(config.controller.store_gb * 1e9),
        no_progress_timeout_s=config.controller.no_progress_timeout_s,
        connect_timeout_s=config.controller.connect_timeout_s,
    )
