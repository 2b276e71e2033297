"""The input of a simulation: a dataflow like that of GRPO, and a cluster with its speeds and faults."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import fsum

from flowrt.controller.policies.batching import Batcher, FixedTokens, TokenBudget
from flowrt.controller.policies.curriculum import Curriculum, EveryPrompt
from flowrt.controller.policies.dispatch.base import Dispatch, Fifo
from flowrt.controller.policies.group_filter import DECISION, GroupFilter, KeepAll
from flowrt.controller.policies.guards import GuardRule
from flowrt.controller.policies.rank_balancing import OnDemand, RankBalancing
from flowrt.controller.policies.weight_sync import DelayedUpdate, WeightSyncPolicy
from flowrt.controller.settings import Dataflow, OnLostSample
from flowrt.protocol.messages import NO_BASE, Column, ColumnLengths, Grant, Offer, Stage, Weights

MODEL = "policy"
PROMPTS_PER_EPOCH = 5
LEASE_S = 100.0
COLUMNS = (
    Column("prompt", "int32", "group"),
    Column("answer", "uint8", "group"),
    Column("response", "int32", "slot"),
    Column("logprobs", "float32", "slot"),
    Column("ref_logprobs", "float32", "slot"),
)
GROUP_COLUMNS = tuple(column.name for column in COLUMNS if column.scope == "group")
DECISIONS = (1.0, 1.0, 1.0, 0.0, -1.0, -2.0)
"""Decisions of the simulated filter function, by the sum of a group's rewards."""
OUTPUT_TENSORS = {"rollout": ("response", "logprobs"), "reference": ("ref_logprobs",)}


def offered_lengths(*lengths: int, prompts: int = 1) -> tuple[ColumnLengths, ...]:
    """The group columns of an offer whose prompts all have these lengths."""
    return tuple(ColumnLengths(name, (length,) * prompts) for name, length in zip(GROUP_COLUMNS, lengths, strict=True))


def offer_one(*, request: int, members: int, prompt: int = 0, epoch: int = 0, flow: str = "train") -> Offer:
    """The offer of one prompt of 4 tokens, with an answer of 1 byte."""
    return Offer(
        request=request,
        flow=flow,
        prompts=(prompt,),
        epoch=epoch,
        members=members,
        at_least=0,
        lengths=offered_lengths(4, 1),
        tags=(),
    )


def next_prompts(number: int, most: int, passed: Mapping[int, frozenset[int]]) -> tuple[int, tuple[int, ...], int]:
    """The prompts that a source offers after ``number`` of them: (epoch, prompts, number after these)."""
    while True:
        epoch, first = divmod(number, PROMPTS_PER_EPOCH)
        count = min(most, PROMPTS_PER_EPOCH - first)
        number += count
        done = passed.get(epoch, frozenset())
        prompts = tuple(prompt for prompt in range(first, first + count) if prompt not in done)
        if prompts:
            return epoch, prompts, number


def decision(rewards: Iterable[float]) -> float:
    """The decision of the simulated filter function on a group."""
    return DECISIONS[int(fsum(rewards) * 1000) % len(DECISIONS)]


def whole(version: int) -> Weights:
    """A version of the simulated model."""
    return Weights(model=MODEL, version=version, base=NO_BASE, bucket_bytes=(8, 8), checksum=0)


def leases_of(grant: Grant) -> tuple[int, ...]:
    """The grant's lease, repeated for each slot."""
    return (grant.lease,) * len(grant.slots)


def grpo_dataflow(reference: bool = True, function: bool = False) -> Dataflow:
    """GRPO with evaluation, with or without logprobs of a reference model and a filter function."""
    stages = [
        Stage("rollout", ("prompt",), OUTPUT_TENSORS["rollout"], generates=True),
        Stage("reward", ("response", "answer"), ("reward",)),
        Stage("evaluate", ("reward",), (), flow="eval"),
    ]
    needs = ["prompt", "response", "logprobs", "reward"]
    if reference:
        stages.append(Stage("reference", ("prompt", "response"), OUTPUT_TENSORS["reference"], flow="train"))
        needs.append("ref_logprobs")
    if function:
        stages.append(Stage("filter", ("reward",), (DECISION,), flow="train", whole_groups=True))
        needs.append(DECISION)
    stages.append(Stage("train", tuple(needs), (), flow="train", whole_groups=True))
    return Dataflow(
        columns=COLUMNS,
        stages=tuple(stages),
        train_stage="train",
        train_flow="train",
        token_columns=("prompt", "response"),
    )


@dataclass(frozen=True, slots=True)
class Scenario:
    """A cluster and a run; ``kills`` and the like are numbers of faults at random moments."""

    seed: int = 0
    bound: int = 1
    strict_issue_order: bool = False
    steps: int = 4
    groups_per_step: int = 2
    members: int = 2
    batcher: Batcher = field(default_factory=lambda: TokenBudget(1))
    dispatch: Dispatch = field(default_factory=Fifo)
    weight_sync: WeightSyncPolicy = field(default_factory=DelayedUpdate)
    rank_balancing: RankBalancing = field(default_factory=OnDemand)
    tokens_per_step: FixedTokens | None = None
    rollouts: int = 2
    rewards: int = 1
    references: int = 1  # 0: the dataflow has no reference stage
    filters: int = 0  # workers with a filter function, which decide on whole groups; 0: no such stage
    ranks: int = 1
    capacity: int = 3  # slots that a worker works on at once
    evals: int = 0
    exact_evals: int = 0  # evaluations of one version
    swaps_at_once: bool = False  # workers swap weights during generation for an evaluation, which is a fault
    publish_every: int = 1
    speeds: tuple[tuple[str, float], ...] = ()  # of the workers that are not as fast as the rest, by id
    fetch_speed: float = 1.0
    sources: int = 1  # all of them offer the same prompts
    kills: int = 0
    source_kills: int = 0
    broken_lanes: int = 0
    broken_links: int = 0  # rollout workers that can send nothing to the first trainer
    expiries: int = 0  # the clock jumps past the deadline of every lease
    crashes: int = 0  # of the controller, which restarts
    late_inventories: int = 0  # restarts after which the inventory of one worker comes after the rejoin timeout
    stalls: int = 0  # the controller does not run for longer than a lease
    losses: int = 0  # a worker reports that its samples cannot be produced
    withdrawals: int = 0  # a worker cancels its pull
    drains: int = 0  # an operator drains a rollout worker, and another one takes its place
    terminations: int = 0  # a rollout worker asks to leave, and another one takes its place
    violations: int = 0  # a worker breaks the protocol and is dismissed
    repeats: int = 0  # a message comes again, perhaps much later
    guards: tuple[GuardRule, ...] = ()
    on_lost_sample: OnLostSample = OnLostSample.REGENERATE
    attempts: int = 8
    prompts_at_once: int = 1  # in one offer to train on
    longest: int = 9  # tokens of a response
    solve_rate: float | None = None  # rewards are 1 with this probability, else 0; None: any from 0 to 1
    group_filter: GroupFilter = field(default_factory=KeepAll)
    filter_tries: int = 128
    curriculum: Curriculum = field(default_factory=EveryPrompt)
    checkpoint_every: int = 0  # steps after which the trainer saves its state; 0: never
    journals: str = ""  # where rollout workers keep what they generate; empty: nowhere
    max_actions: int = 50_000
