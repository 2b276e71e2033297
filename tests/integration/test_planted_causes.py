"""Real processes with a planted cause of waiting: the attribution names it, and finds the planted seconds again."""

import pytest
from seeing_parts.attribution import BOUNDS, Cast, of_plant

pytestmark = [pytest.mark.slow, pytest.mark.long]


def test_a_slow_trainer_is_named_and_its_seconds_are_found() -> None:
    with Cast() as cast:
        figures = of_plant(cast, "trainer")
    assert figures["causes_missed"] == 0
    assert figures["attribution_gap"] <= BOUNDS["attribution_gap"]
    assert figures["attribution_sum_error"] <= BOUNDS["attribution_sum_error"]
