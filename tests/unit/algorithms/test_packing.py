import pytest
import torch

from flowrt.algorithms import cut_by_tokens, pad_samples


def test_padded_rows_and_their_masks() -> None:
    padded = pad_samples(
        [torch.tensor([5, 6]), torch.tensor([7]), torch.tensor([8])],
        [torch.tensor([1, 0, 2]), torch.tensor([3]), torch.tensor([], dtype=torch.long)],
        pad_id=0,  # also a real token of the first response
    )
    assert padded.tokens_BL.tolist() == [[5, 6, 1, 0, 2], [7, 3, 0, 0, 0], [8, 0, 0, 0, 0]]
    assert padded.response_mask_BL.int().tolist() == [[0, 0, 1, 1, 1], [0, 1, 0, 0, 0], [0, 0, 0, 0, 0]]
    assert padded.sample_T.tolist() == [0, 0, 0, 1]


def test_samples_that_cannot_be_padded_are_refused() -> None:
    single, none = torch.tensor([1]), torch.tensor([], dtype=torch.long)
    with pytest.raises(ValueError, match="prompt of sample 1 is empty"):
        pad_samples([single, none], [single, single], pad_id=0)
    with pytest.raises(ValueError, match="1 prompts and 2 responses"):
        pad_samples([single], [single, single], pad_id=0)
    with pytest.raises(ValueError, match="0 prompts and 0 responses"):
        pad_samples([], [], pad_id=0)


def test_samples_are_cut_by_padded_size() -> None:
    lengths = [2, 3, 1, 1, 1, 9, 1]
    # Padded: 2 rows x 3 = 6 fits, 3 x 3 doesn't; 9 exceeds the budget and is a part of its own.
    assert cut_by_tokens(lengths, 6) == [[0, 1], [2, 3, 4], [5], [6]]
    assert cut_by_tokens([], 6) == []


def test_a_longer_sample_increases_the_padded_size_of_earlier_rows() -> None:
    assert cut_by_tokens([1, 1, 4], 11) == [[0, 1], [2]]
    assert cut_by_tokens([1, 1, 4], 12) == [[0, 1, 2]]


def test_invalid_cut_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="budget_tokens is 0"):
        cut_by_tokens([1], 0)
    with pytest.raises(ValueError, match="length of sample 1 is -2"):
        cut_by_tokens([1, -2], 4)
