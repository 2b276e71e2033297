"""Small scenarios with checkpoints, for runs that are interrupted; some have further faults."""

from typing import Any

from hypothesis import strategies as st

from flowrt.controller.policies.batching import TokenBudget
from tests.simulation.scenario import Scenario

FAULTS: st.SearchStrategy[dict[str, Any]] = st.sampled_from(
    [{}, {"kills": 3}, {"broken_lanes": 2, "expiries": 1}, {"kills": 2, "crashes": 1}, {"terminations": 1, "kills": 1}]
)
CRASHES = st.lists(st.integers(1, 400), min_size=1, max_size=3)
"""Events of each execution after which it is interrupted."""


@st.composite
def interrupted_scenarios(draw: st.DrawFn) -> Scenario:
    return Scenario(
        seed=draw(st.integers(0, 2**32)),
        bound=draw(st.integers(0, 3)),
        strict_issue_order=draw(st.booleans()),
        steps=draw(st.integers(2, 6)),
        groups_per_step=draw(st.integers(1, 3)),
        members=draw(st.integers(1, 3)),
        batcher=draw(st.sampled_from([TokenBudget(1), TokenBudget(60)])),
        ranks=draw(st.integers(1, 2)),
        checkpoint_every=draw(st.integers(1, 3)),
        **draw(FAULTS),
    )
