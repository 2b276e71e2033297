"""GRPO, the whole dataflow: which columns there are, which stage needs and makes which, under which policies.

::

    source    offers   prompt, answer                                   (one of each for a group)
    rollout   needs    prompt                            makes response, logprobs
    reward    needs    response, answer                  makes reward
    reference needs    prompt, response                  makes ref_logprobs        (training only)
    train     needs    all of these, of a whole group                              (training only)
    evaluate  needs    reward                                                      (evaluation only)

`reward` and `reference` run side by side: both become ready when their columns exist, nobody orders them.
"""

from flowrt.controller.admission import StrictLag
from flowrt.controller.batchers import FixedTokens, TokenBudget
from flowrt.controller.dispatch import Fifo
from flowrt.controller.refresh import DelayedUpdate, Divergence, EveryN, Refresh, Rolling
from flowrt.controller.settings import Dataflow, LostMember, Policies, Settings
from flowrt.controller.sharing import Balanced, OnDemand
from flowrt.recipes.config import RefreshConfig, RunConfig
from flowrt.wire.records import Column, Stage

POLICY = "policy"
TRAIN, EVAL = "train", "eval"
"""The two flows: groups that are trained on, groups that are only scored."""


def dataflow(config: RunConfig) -> Dataflow:
    """Columns and stages; without a KL coefficient there is no reference."""
    with_reference = config.loss.kl_coef > 0
    columns = [
        Column("prompt", "int32", "group"),
        Column("answer", "uint8", "group"),
        Column("response", "int32", "slot"),
        Column("logprobs", "float32", "slot"),
    ]
    train_needs = ["prompt", "response", "logprobs", "reward"]
    stages = [
        Stage("rollout", needs=("prompt",), makes=("response", "logprobs"), generates=True),
        Stage("reward", needs=("response", "answer"), makes=("reward",)),
        Stage("evaluate", needs=("reward",), makes=(), flow=EVAL),
    ]
    if with_reference:
        columns.append(Column("ref_logprobs", "float32", "slot"))
        stages.append(Stage("reference", needs=("prompt", "response"), makes=("ref_logprobs",), flow=TRAIN))
        train_needs.append("ref_logprobs")
    stages.append(Stage("train", needs=tuple(train_needs), makes=(), flow=TRAIN, whole_groups=True))
    return Dataflow(tuple(columns), tuple(stages), "train", TRAIN, ("prompt", "response"))


def policies(config: RunConfig) -> Policies:
    """The defaults of the seams that the controller asks."""
    return Policies(
        admission=StrictLag(config.staleness),
        dispatch=Fifo(),
        batcher=TokenBudget(config.trainer.micro_batch_tokens),
        refresh=refresh(config.rollout.refresh),
        sharing=Balanced(config.trainer.ranks) if config.trainer.balanced else OnDemand(),
        cut=FixedTokens(config.trainer.step_tokens, order="shuffled", seed=config.seed)
        if config.trainer.step_tokens
        else None,
    )


def refresh(config: RefreshConfig) -> Refresh:
    """Which receivers are due when there is a newer version."""
    match config.policy:
        case "rolling":
            return Rolling(config.at_once)
        case "every":
            return EveryN(config.versions)
        case "divergence":
            return Divergence(config.threshold, config.max_age)
    return DelayedUpdate()


def settings(config: RunConfig) -> Settings:
    """Numbers of the run, as the controller needs them."""
    return Settings(
        steps=config.steps,
        groups_per_step=config.prompts_per_step,
        finishers=("source", "trainer"),
        vital_roles=("trainer",),
        needed_roles=("source", "rollout", "reward", "reference"),
        absence_s=config.supervisor.absence_s,
        savers=("trainer",),
        drain_s=config.checkpoint.drain_s,
        model=POLICY,
        in_order=config.deterministic,
        lost_member=LostMember(config.lost_member),
        lease_s=config.controller.lease_s,
        silence_s=config.controller.silence_s,
        return_s=config.controller.return_s,
        lanes=config.controller.lanes,
        lane_s=config.controller.lane_s,
        lane_mb_per_s=config.controller.lane_mb_per_s,
        store_bytes=int(config.controller.store_gb * 1e9),
        stall_s=config.controller.stall_s,
    )
