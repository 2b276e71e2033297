import math
from typing import Any

import pytest
import torch

from flowrt.algorithms.advantages import Scale
from tests.groups import group_advantages

LEAVE_ONE_OUT = {"baseline": "leave_one_out", "scale": "none"}
SCALES: tuple[Scale, ...] = ("group_std", "none", "batch_std")


def test_group_std_is_the_sample_std() -> None:
    advantages = group_advantages(torch.tensor([1.0, 0.0, 0.0, 1.0]), torch.zeros(4, dtype=torch.long), eps=0.0)
    # Deviations +-0.5, squares sum to 1, over n - 1 = 3.
    expected = 0.5 / math.sqrt(1 / 3)
    torch.testing.assert_close(advantages, torch.tensor([expected, -expected, -expected, expected]))


def test_eps_is_added_to_the_std() -> None:
    advantages = group_advantages(torch.tensor([0.0, 2.0]), torch.zeros(2, dtype=torch.long), eps=0.5)
    torch.testing.assert_close(advantages[1].item(), 1 / (math.sqrt(2) + 0.5))


def test_interleaved_groups_are_centred_separately() -> None:
    rewards = torch.tensor([1.0, 10.0, 2.0, 30.0, 6.0])
    groups = torch.tensor([900, -4, 900, -4, 900])
    torch.testing.assert_close(
        group_advantages(rewards, groups, scale="none"), torch.tensor([-2.0, -10.0, -1.0, 10.0, 3.0])
    )


def test_batch_std_divides_by_the_std_of_all_rewards() -> None:
    advantages = group_advantages(
        torch.tensor([0.0, 1.0, 0.0, 2.0]), torch.tensor([0, 0, 1, 1]), scale="batch_std", eps=0.0
    )
    std = math.sqrt(2.75 / 3)  # mean 0.75; squares 0.5625 + 0.0625 + 0.5625 + 1.5625
    torch.testing.assert_close(advantages, torch.tensor([-0.5, 0.5, -1.0, 1.0]) / std)


def test_leave_one_out_subtracts_the_mean_of_the_other_rewards() -> None:
    rewards, groups = torch.tensor([1.0, 5.0, 2.0, 7.0, 6.0]), torch.tensor([0, 1, 0, 1, 0])
    advantages = group_advantages(rewards, groups, **LEAVE_ONE_OUT)
    torch.testing.assert_close(advantages, torch.tensor([-3.0, -2.0, -1.5, 2.0, 4.5]))


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [2, 3, 6, 7, 10])
@pytest.mark.parametrize("value", [0.1, 0.7, 1 / 3, -1e-3, 0.0])
def test_equal_rewards_give_advantages_of_exactly_zero(
    scale: Scale, dtype: torch.dtype, size: int, value: float
) -> None:
    # eps=0 would turn any rounding residue into an advantage near 1; 0/0 would be NaN.
    rewards = torch.tensor([value] * size + [1.0, 0.0], dtype=dtype)
    groups = torch.tensor([0] * size + [1, 1])
    assert group_advantages(rewards, groups, scale=scale)[:size].tolist() == [0.0] * size
    assert group_advantages(rewards, groups, **LEAVE_ONE_OUT)[:size].tolist() == [0.0] * size


def test_a_group_of_one_is_refused_with_a_group_baseline() -> None:
    rewards, groups = torch.tensor([1.0, 0.0, 5.0]), torch.tensor([3, 3, 42])
    with pytest.raises(ValueError, match=r"group 42 has 1 sample.*raise --group-size, or use baseline none"):
        group_advantages(rewards, groups)
    with pytest.raises(ValueError, match="group 42 has 1 sample"):
        group_advantages(rewards, groups, **LEAVE_ONE_OUT)
    assert group_advantages(rewards, groups, baseline="none", scale="none")[2] == 5
    assert group_advantages(rewards, groups, baseline="none", scale="batch_std")[2] > 0


def test_advantages_of_integer_bool_and_bfloat16_rewards_are_float32() -> None:
    groups = torch.tensor([0, 0])
    for rewards in (torch.tensor([0, 1]), torch.tensor([False, True]), torch.tensor([0.0, 1.0]).bfloat16()):
        advantages = group_advantages(rewards, groups, scale="none")
        assert advantages.dtype == torch.float32
        assert advantages.tolist() == [-0.5, 0.5]


def test_invalid_input_raises_an_error_that_names_it() -> None:
    with pytest.raises(ValueError, match="reward of sample 1 is nan"):
        group_advantages(torch.tensor([0.0, float("nan")]), torch.tensor([0, 0]))
    with pytest.raises(ValueError, match=r"rewards_N \[2\] and groups_N \[3\]"):
        group_advantages(torch.zeros(2), torch.zeros(3, dtype=torch.long))


@pytest.mark.parametrize(
    "rule",
    [{"scale": "batch_std"}, {"scale": "none", "whiten": True}, {"scale": "batch_std", "whiten": True}],
)
@pytest.mark.parametrize("baseline", ["none", "batch_mean"])
def test_the_only_sample_of_a_step_has_no_advantage_over_others(rule: dict[str, Any], baseline: str) -> None:
    """Of a step that lost its others, which is no reason to end the run."""
    advantages = group_advantages(torch.tensor([3.0]), torch.zeros(1, dtype=torch.long), baseline=baseline, **rule)
    assert advantages.tolist() == [0.0]
