"""Mutation test of the simulations: each classic bug is planted into the core or the ledger, and must be found.

The same simulated clusters run for every bug. It is found if `Core.check`, a simulated worker or the final invariants
fail; without a bug all pass.
"""

import itertools
import random
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from flowrt.controller.policies.batching import Batcher, GroupCount, TokenBudget
from flowrt.controller.policies.group_filter import ZeroVariance
from flowrt.controller.settings import OnLostSample
from tests.property.mutants import BUGS, planted
from tests.simulation.cluster import SimulatedCluster
from tests.simulation.preempted_runs import run_with_preemptions
from tests.simulation.resumed_runs import run_with_crashes
from tests.simulation.run_invariants import (
    assert_evaluated,
    assert_exact,
    assert_filtered,
    assert_generated_kept,
    assert_sound,
)
from tests.simulation.scenario import Scenario

RUNS = 32
DECISIVE = (7, 19)
"""Seeds that show bugs which few others show."""
FILTERED_RUNS = 8
TERMINATED_RUNS = 24
DRAINED_RUNS = 12
PREEMPTED_RUNS = 8
KEPT_RUNS = 12
LATE_SEEDS = range(10, 22)
EVALUATED_RUNS = 18
SOURCES_RUNS = 18
LINKS_RUNS = 12
RELAYS_RUNS = 12


def scenario_of(seed: int) -> Scenario:
    """A small cluster with some faults of every kind."""
    rng = random.Random(f"planted {seed}")
    bound, groups = rng.randint(0, 2), rng.randint(1, 3)
    batchers: list[Batcher] = [TokenBudget(1), TokenBudget(40), GroupCount(2)]
    return Scenario(
        seed=seed,
        bound=bound,
        strict_issue_order=rng.random() < 0.2,
        steps=rng.randint(2, 5),
        groups_per_step=groups,
        members=rng.randint(1, 3),
        batcher=rng.choice(batchers),
        rollouts=rng.randint(1, 3),
        rewards=rng.randint(1, 2),
        references=rng.randint(0, 1),
        ranks=rng.randint(1, 2),
        speeds=rng.choice([(), (("rollout0", 0.02),)]),
        evals=rng.choice([0, 3]),
        kills=rng.randint(0, 3),
        broken_lanes=rng.randint(0, 4),
        expiries=rng.randint(0, 2),
        losses=rng.randint(0, 2),
        withdrawals=rng.randint(0, 4),
        repeats=4,
        on_lost_sample=rng.choice(list(OnLostSample)),
        prompts_at_once=min(rng.randint(1, 2), (bound + 1) * groups),
        max_actions=10_000,
    )


def filtered_scenario_of(seed: int) -> Scenario:
    """A small cluster whose groups are filtered, and whose controller is restarted."""
    rng = random.Random(f"planted filter {seed}")
    return Scenario(
        seed=seed,
        bound=seed % 3,
        steps=5,
        groups_per_step=rng.randint(1, 3),
        group_filter=ZeroVariance(),
        filter_tries=rng.randint(2, 5),
        solve_rate=rng.choice([0.5, 0.9, 1.0]),
        kills=rng.randint(0, 1),
        crashes=2,
        max_actions=10_000,
    )


def terminated_scenario_of(seed: int) -> Scenario:
    """A small cluster whose workers are terminated, and whose controller is stopped and restarted."""
    return Scenario(
        seed=seed, bound=seed % 3, steps=4, rollouts=3, terminations=2, stalls=2, crashes=3, max_actions=10_000
    )


def late_scenario_of(seed: int) -> Scenario:
    """A small cluster in which the inventory of a worker comes after the recovery of the controller."""
    rng = random.Random(f"planted late {seed}")
    return Scenario(
        seed=seed,
        bound=rng.randint(0, 2),
        steps=5,
        groups_per_step=rng.randint(1, 3),
        members=rng.randint(1, 3),
        rollouts=rng.randint(2, 3),
        rewards=2,
        references=rng.randint(0, 2),
        longest=1,
        crashes=4,
        late_inventories=4,
        max_actions=10_000,
    )


def evaluated_scenario_of(seed: int) -> Scenario:
    """A small cluster with evaluations of single versions; workers die and the controller is restarted meanwhile."""
    rng = random.Random(f"planted evaluation {seed}")
    return Scenario(
        seed=seed,
        bound=rng.randint(0, 2),
        steps=rng.randint(2, 4),
        groups_per_step=rng.randint(1, 3),
        members=rng.randint(1, 3),
        exact_evals=4,
        kills=rng.randint(1, 3),
        losses=rng.randint(0, 3),
        repeats=6,
        crashes=seed % 3,
        attempts=rng.choice([1, 8]),
        on_lost_sample=list(OnLostSample)[seed % 3],
        max_actions=10_000,
    )


def drained_scenario_of(seed: int) -> Scenario:
    """A small cluster whose workers an operator drains, and whose controller is restarted."""
    return Scenario(seed=seed, bound=seed % 3, steps=4, rollouts=3, drains=2, crashes=3, max_actions=10_000)


def run_preempted(seed: int, directory: Path) -> None:
    """Run a cluster that is preempted, and whose controller is restarted before it has saved."""
    scenario = Scenario(seed=seed, bound=seed % 3, steps=4, ranks=1 + seed % 2, crashes=2, max_actions=10_000)
    runs = run_with_preemptions(scenario, [120 + 10 * seed], directory / f"preempted{seed}.sqlite")
    try:
        assert_exact(runs, scenario)
        assert [closed.step for cluster in runs.clusters for closed in cluster.steps] == list(range(scenario.steps))
    finally:
        runs.ledger.close()


def sources_scenario_of(seed: int) -> Scenario:
    """A small cluster with one or two sources, some of which die."""
    return Scenario(
        seed=seed,
        bound=seed % 3,
        steps=4,
        sources=1 + seed % 2,
        source_kills=1 + seed % 3,
        kills=seed % 2,
        exact_evals=3,
        crashes=seed // 3 % 2,
        max_actions=10_000,
    )


def links_scenario_of(seed: int) -> Scenario:
    """A small cluster in which some rollout workers can send nothing to the trainer."""
    rng = random.Random(f"planted links {seed}")
    return Scenario(
        seed=seed,
        bound=rng.randint(0, 2),
        steps=rng.randint(3, 6),
        groups_per_step=rng.randint(1, 3),
        members=rng.randint(1, 3),
        rollouts=3,
        references=seed % 2,
        broken_links=1 + seed % 2,
        kills=seed % 3 // 2,
        max_actions=10_000,
    )


def relays_scenario_of(seed: int) -> Scenario:
    """A cluster that spreads weights slowly over relays, some of which break or die."""
    return Scenario(
        seed=seed,
        bound=1 + seed % 2,
        steps=5,
        rollouts=5,
        references=0,
        fetch_speed=0.03,
        broken_lanes=8,
        kills=2,
        max_actions=10_000,
    )


def run_filtered(seed: int) -> None:
    cluster = SimulatedCluster(filtered_scenario_of(seed)).run()
    assert_sound(cluster)
    assert_filtered(cluster)


def run_evaluated(seed: int) -> None:
    cluster = SimulatedCluster(evaluated_scenario_of(seed)).run()
    assert_sound(cluster)
    assert_evaluated(cluster)


def run_with_sources(seed: int) -> None:
    cluster = SimulatedCluster(sources_scenario_of(seed)).run()
    assert_sound(cluster)
    assert_evaluated(cluster)
    if not cluster.scenario.kills:
        assert_generated_kept(cluster)


def run_resumed(seed: int, directory: Path) -> None:
    scenario = Scenario(seed=seed, bound=seed % 3, steps=4, checkpoint_every=2)
    runs = run_with_crashes(scenario, [100 + 8 * seed, 60], directory / f"{seed}.sqlite")
    try:
        assert_exact(runs, scenario)
    finally:
        runs.ledger.close()


def run_kept(seed: int, directory: Path) -> None:
    """Run a cluster that is interrupted twice and takes over what its journals have."""
    scenario = Scenario(
        seed=seed, bound=1 + seed % 3, steps=6, checkpoint_every=2, capacity=6, members=3, kills=seed % 2
    )
    place = directory / f"kept{seed}"
    place.mkdir(exist_ok=True)
    runs = run_with_crashes(scenario, [200 + 20 * seed, 150], place / "ledger.sqlite", journals=True)
    try:
        assert_exact(runs, scenario)
    finally:
        runs.ledger.close()


def run_all(directory: Path, share: int = 1) -> None:
    """Run clusters with faults, among them interrupted and resumed runs, and runs with a group filter.

    Kinds take turns, so that a bug that only one of them shows is found early. ``share``: only each n-th of a kind.
    """
    kinds: list[tuple[Iterable[int], Callable[[int], None]]] = [
        (sorted(range(RUNS), key=lambda seed: seed not in DECISIVE), lambda seed: run_sound(scenario_of(seed))),
        (range(FILTERED_RUNS), run_filtered),
        (range(EVALUATED_RUNS), run_evaluated),
        (range(SOURCES_RUNS), run_with_sources),
        (range(RELAYS_RUNS), lambda seed: run_sound(relays_scenario_of(seed))),
        (range(LINKS_RUNS), lambda seed: run_sound(links_scenario_of(seed))),
        (range(TERMINATED_RUNS), lambda seed: run_sound(terminated_scenario_of(seed))),
        (range(DRAINED_RUNS), lambda seed: run_sound(drained_scenario_of(seed))),
        (range(PREEMPTED_RUNS), lambda seed: run_preempted(seed, directory)),
        (range(0, RUNS, 4), lambda seed: run_resumed(seed, directory)),
        (LATE_SEEDS, lambda seed: run_sound(late_scenario_of(seed))),
        (range(KEPT_RUNS), lambda seed: run_kept(seed, directory)),
    ]
    turns = itertools.zip_longest(*([(run, seed) for seed in seeds] for seeds, run in kinds))
    for turn in itertools.islice(turns, 0, None, share):
        for case in turn:
            if case is not None:
                run, seed = case
                run(seed)


def run_sound(scenario: Scenario) -> None:
    assert_sound(SimulatedCluster(scenario).run())


@pytest.mark.slow
@pytest.mark.parametrize("share", [3, pytest.param(1, marks=pytest.mark.long)])
def test_without_a_bug_every_run_is_sound(share: int, tmp_path: Path) -> None:
    run_all(tmp_path, share)


# All of them take minutes: `make test` runs each fourth.
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.long] if at % 4 else []) for at, name in enumerate(BUGS)]
)
@pytest.mark.slow
def test_a_planted_bug_is_found(name: str, tmp_path: Path) -> None:
    with planted(*BUGS[name]), pytest.raises(AssertionError):
        run_all(tmp_path)
