"""Whole runs with up to thousands of simulated workers, in virtual time."""

import dataclasses

import pytest

from flowrt.controller.policies.dispatch.length_aware import LengthAware, completion_s
from flowrt.controller.policies.weight_sync import Rolling
from flowrt.engines.simulated.workload import GenerationCost, Lengths, LogNormal, TrainCost, Uniform
from flowrt.simulation.cluster import ClusterPlan, ClusterSimulation

DECODE = GenerationCost(base_s=0.01, per_row_s=0.0005)
PLAN = ClusterPlan(
    workers=8,
    rows=16,
    groups_per_step=16,
    members=8,
    steps=4,
    lengths=Lengths(LogNormal(200, 0.8, 2000), correlation=0.6, seed=1),
    decode=DECODE,
    train=TrainCost(token_s=1e-4, optimizer_s=0.5),
)


def assert_sound(simulation: ClusterSimulation) -> None:
    plan = simulation.plan
    assert [closed.step for _, closed in simulation.steps] == list(range(plan.steps))
    assert all(closed.groups == plan.groups_per_step for _, closed in simulation.steps)
    assert max(lag for _, closed in simulation.steps for lag in closed.lags) <= plan.bound
    assert dict(simulation.core.state.dropped) == {}


def test_simulation_is_deterministic() -> None:
    first, second = ClusterSimulation(PLAN), ClusterSimulation(PLAN)
    assert first.run() == second.run()
    assert_sound(first)
    assert first.steps == second.steps


def test_single_worker_takes_the_time_of_the_cost_model() -> None:
    plan = dataclasses.replace(
        PLAN, workers=1, rows=8, groups_per_step=1, steps=1, bound=0, train=TrainCost(token_s=0.0), transfer_s=0.0
    )
    lengths = [plan.lengths.draw(b"0", member) for member in range(8)]
    assert abs(ClusterSimulation(plan).run() - completion_s(lengths, DECODE.step_s)) < 1e-6


@pytest.mark.slow
def test_two_thousand_workers_keep_the_staleness_bound() -> None:
    plan = dataclasses.replace(
        PLAN, workers=2000, rows=4, groups_per_step=500, members=8, steps=3, lengths=Lengths(Uniform(50, 400), 0.5, 2)
    )
    simulation = ClusterSimulation(plan)
    simulation.run()
    assert_sound(simulation)
    # Each slot is pulled, committed and trained by a bounded number of events, for any number of waiting workers.
    assert simulation.events < 6 * plan.workers + 4 * plan.groups_per_step * plan.members * (plan.steps + 2)


def test_staleness_saves_time_and_rolling_sync_keeps_the_bound() -> None:
    synchronous = ClusterSimulation(dataclasses.replace(PLAN, bound=0))
    delayed = ClusterSimulation(PLAN)
    rolling = ClusterSimulation(dataclasses.replace(PLAN, weight_sync=Rolling(2)))
    assert delayed.run() < 0.8 * synchronous.run()
    rolling.run()
    for simulation in (synchronous, delayed, rolling):
        assert_sound(simulation)


@pytest.mark.slow
def test_length_aware_dispatch_shortens_synchronous_steps() -> None:
    ratios = []
    for seed in range(4):
        lengths = Lengths(LogNormal(200, 1.0, 4000), correlation=0.85, seed=seed)
        decode = GenerationCost(
            base_s=0.01, per_row_s=0.001
        )  # above ten rows, each additional row slows the others down
        plan = dataclasses.replace(
            PLAN, bound=0, rows=32, groups_per_step=32, prompts=32, steps=5, lengths=lengths, decode=decode
        )
        lanes = LengthAware(decode.step_s, plan.groups_per_step * plan.members)
        fifo, tail = ClusterSimulation(plan), ClusterSimulation(dataclasses.replace(plan, dispatch=lanes))
        fifo.run()
        tail.run()
        assert_sound(tail)
        # The lengths are unknown in the first epoch, so it does not count.
        ratios.append((fifo.steps[-1][0] - fifo.steps[0][0]) / (tail.steps[-1][0] - tail.steps[0][0]))
    assert sum(ratios) / len(ratios) > 1.05, ratios
    assert min(ratios) > 0.95, ratios
