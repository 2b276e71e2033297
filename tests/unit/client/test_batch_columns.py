"""Columns of a batch by name: one that is not there is named, with those that are."""

import pytest
import torch

from flowrt.client.sample_tensors import Columns, Numbers


def test_a_missing_column_is_named_with_the_others() -> None:
    columns = Columns({"prompt": [torch.zeros(2)], "response": [torch.zeros(3)]})
    for access in (columns.__getitem__, columns.packed):
        with pytest.raises(KeyError, match="the batch has no tensors 'respons'; there is 'prompt', 'response'"):
            access("respons")
    with pytest.raises(KeyError, match="the batch has no numbers 'rewards'; there is 'reward'"):
        Numbers({"reward": [1.0]})["rewards"]
    assert "respons" not in columns
    assert columns.get("respons") is None
    assert len(columns.packed("response").values) == 3


def test_the_error_of_a_batch_without_rows_explains_it() -> None:
    for access in (Columns({}).__getitem__, Columns({}).packed):
        with pytest.raises(KeyError, match="no tensors 'prompt', and no others: a batch without rows has none"):
            access("prompt")
    with pytest.raises(KeyError, match="no numbers 'reward', and no others: a batch without rows has none"):
        Numbers()["reward"]
