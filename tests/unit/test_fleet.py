"""Thousands of simulated workers around a real core, in simulated time."""

import dataclasses

from flowrt.controller.refresh import Rolling
from flowrt.controller.tail import TailLanes
from flowrt.engines.costs import DecodeCost, TrainCost
from flowrt.engines.lengths import Lengths, LogNormal, Uniform
from flowrt.testing.fleet import Fleet, FleetPlan

DECODE = DecodeCost(base_s=0.01, per_row_s=0.0005)
PLAN = FleetPlan(
    workers=8,
    rows=16,
    groups_per_step=16,
    members=8,
    steps=4,
    lengths=Lengths(LogNormal(200, 0.8, 2000), correlation=0.6, seed=1),
    decode=DECODE,
    train=TrainCost(token_s=1e-4, optimizer_s=0.5),
)


def assert_sound(fleet: Fleet) -> None:
    plan = fleet.plan
    assert [closed.step for _, closed in fleet.steps] == list(range(plan.steps))
    assert all(closed.groups == plan.groups_per_step for _, closed in fleet.steps)
    assert max(lag for _, closed in fleet.steps for lag in closed.lags) <= plan.bound
    assert dict(fleet.core.samples.retreat.dropped) == {}


def test_a_run_ends_and_takes_the_same_course_each_time() -> None:
    first, second = Fleet(PLAN), Fleet(PLAN)
    assert first.run() == second.run()
    assert_sound(first)
    assert first.steps == second.steps


def test_one_worker_alone_takes_what_the_formula_says() -> None:
    plan = dataclasses.replace(
        PLAN, workers=1, rows=8, groups_per_step=1, steps=1, bound=0, train=TrainCost(token_s=0.0), transfer_s=0.0
    )
    lengths = [plan.lengths.draw(b"0", member) for member in range(8)]
    assert abs(Fleet(plan).run() - DECODE.together_s(lengths)) < 1e-6


def test_two_thousand_workers_keep_the_bound() -> None:
    plan = dataclasses.replace(
        PLAN, workers=2000, rows=4, groups_per_step=500, members=8, steps=3, lengths=Lengths(Uniform(50, 400), 0.5, 2)
    )
    fleet = Fleet(plan)
    fleet.run()
    assert_sound(fleet)
    # Each slot is pulled, committed and trained by a bounded number of events, however many workers wait beside it.
    assert fleet.events < 6 * plan.workers + 4 * plan.groups_per_step * plan.members * (plan.steps + 2)


def test_the_bound_pays_and_rolling_keeps_the_promises() -> None:
    synchronous = Fleet(dataclasses.replace(PLAN, bound=0))
    delayed = Fleet(PLAN)
    rolling = Fleet(dataclasses.replace(PLAN, refresh=Rolling(2)))
    assert delayed.run() < 0.8 * synchronous.run()
    rolling.run()
    for fleet in (synchronous, delayed, rolling):
        assert_sound(fleet)


def test_tail_lanes_shorten_synchronous_steps_whose_long_prompts_are_known() -> None:
    ratios = []
    for seed in range(4):
        lengths = Lengths(LogNormal(200, 1.0, 4000), correlation=0.85, seed=seed)
        decode = DecodeCost(base_s=0.01, per_row_s=0.001)  # above ten rows every further one slows the others down
        plan = dataclasses.replace(
            PLAN, bound=0, rows=32, groups_per_step=32, prompts=32, steps=5, lengths=lengths, decode=decode
        )
        lanes = TailLanes(decode.step_s, plan.groups_per_step * plan.members)
        fifo, tail = Fleet(plan), Fleet(dataclasses.replace(plan, dispatch=lanes))
        fifo.run()
        tail.run()
        assert_sound(tail)
        # The first epoch teaches the lengths; what counts is the time after it.
        ratios.append((fifo.steps[-1][0] - fifo.steps[0][0]) / (tail.steps[-1][0] - tail.steps[0][0]))
    assert sum(ratios) / len(ratios) > 1.05, ratios
    assert min(ratios) > 0.95, ratios
