"""Losses and gradients against numbers that TRL 1.16 computed, by ``python -m tests.proofs.trl``."""

import json
from pathlib import Path

import pytest
import torch

from tests.proofs.trl import CORRECTIONS, LOSSES, SPREADS, TOKEN_CASES, Values, token_cases, token_errors

FIXTURE: dict[str, Values] = json.loads((Path(__file__).parent / "trl_losses.json").read_text())
BOUND, FLOAT32_BOUND = 1e-12, 1e-7
"""SAPO's temperatures are rounded to float32 in TRL."""


def test_the_fixture_has_every_case() -> None:
    assert FIXTURE.keys() == token_cases().keys()
    assert len(FIXTURE) == len(TOKEN_CASES) * len(SPREADS)
    assert {"sapo", "vespo", "unbiased_k3"} <= LOSSES.keys()
    assert CORRECTIONS.keys() <= TOKEN_CASES.keys()


@pytest.mark.parametrize("name", TOKEN_CASES)
def test_loss_and_gradient_equal_those_of_trl(name: str) -> None:
    torch.set_num_threads(1)
    cases = token_cases()
    errors = [token_errors(name, cases[case], FIXTURE[case]) for case in cases if case.split()[0] == name]
    assert len(errors) == len(SPREADS)
    assert max(max(pair) for pair in errors) <= (FLOAT32_BOUND if name == "sapo" else BOUND)


def test_the_values_of_another_case_are_detected() -> None:
    cases = token_cases()
    loss, gradient = token_errors("dapo", cases["dapo 0.3"], FIXTURE["grpo 0.3"])
    assert loss > 1e-3
    assert gradient > 1e-3
