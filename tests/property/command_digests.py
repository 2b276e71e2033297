"""Prints a digest of all events and commands of simulated runs, of the reported waits, and of their causes.

A child process of test_hash_seeds: the digests are the same in every process, whatever its hash seed.
"""

import hashlib
import sys

from flowrt.controller.policies.batching import FixedTokens, GroupCount, TokenBudget
from flowrt.controller.policies.dispatch.base import Dispatch, Fifo
from flowrt.controller.policies.dispatch.length_aware import DecodeCost, LengthAware
from flowrt.controller.policies.dispatch.priority import Priority
from flowrt.controller.policies.rank_balancing import Balanced, OnDemand
from flowrt.controller.policies.weight_sync import DelayedUpdate, EveryN, Rolling, WeightSyncPolicy
from flowrt.controller.settings import OnLostSample
from tests.simulation.cluster import SimulatedCluster
from tests.simulation.scenario import Scenario

DISPATCH: tuple[Dispatch, ...] = (
    Fifo(),
    LengthAware(DecodeCost(base_s=0.01, per_row_s=0.001), 8),
    Priority(lambda slot: float(slot.id % 3), ageing=0.5),
)
WEIGHT_SYNC: tuple[WeightSyncPolicy, ...] = (DelayedUpdate(), Rolling(1), EveryN(2))


def scenario(seed: int) -> Scenario:
    """Every kind of fault and policy in turn."""
    return Scenario(
        seed=seed,
        bound=seed % 4,
        steps=4,
        groups_per_step=2 + seed % 3,
        members=2,
        batcher=(TokenBudget(1), GroupCount(2), TokenBudget(60))[seed % 3],
        dispatch=DISPATCH[seed % 3],
        weight_sync=WEIGHT_SYNC[seed % 3],
        rank_balancing=(OnDemand(), Balanced(1 + seed % 3))[seed % 2],
        tokens_per_step=FixedTokens(30) if seed % 5 == 0 else None,
        rollouts=1 + seed % 4,
        rewards=1 + seed % 2,
        references=seed % 3,
        ranks=1 + seed % 3,
        kills=seed % 4,
        broken_lanes=seed % 3,
        # After a jump of the clock beyond every lease a worker would rejoin too late.
        expiries=seed % 2,
        crashes=0 if seed % 2 else seed // 3 % 3,
        losses=seed % 2,
        withdrawals=seed % 3,
        repeats=seed % 2,
        evals=seed % 2,
        exact_evals=seed % 3,
        on_lost_sample=tuple(OnLostSample)[seed % 3],
        attempts=3,
        journals="journals/2" if seed % 4 > 1 else "",
    )


def main() -> None:
    for seed in range(int(sys.argv[1])):
        cluster = SimulatedCluster(scenario(seed))
        digest = hashlib.sha256()
        while cluster.step():
            if cluster.actions % 20 == 0:
                waits = cluster.core.wait_graph(cluster.clock.now()).sentences(100)
                digest.update(repr(waits).encode())
                digest.update(repr(cluster.core.waits.take()).encode())
        for entry in cluster.log:
            digest.update(repr(entry).encode())
        sys.stdout.write(f"{seed} {len(cluster.log)} {digest.hexdigest()}\n")


if __name__ == "__main__":
    main()
