"""Tensors in the only form in which SGLang accepts them within a request: a pickle of names and tensors, in base64.

A separate file, so that a test can check that no other file imports pickle, and that nothing is ever unpickled.
Pickles are sent only if ``rollout.sglang.weights`` is tensor.
"""

import base64
import pickle
from collections.abc import Sequence

import torch


def serialized(tensors: Sequence[tuple[str, torch.Tensor]]) -> str:
    """Serialise named tensors. Each is copied, because a view would be pickled with its whole bucket."""
    return base64.b64encode(pickle.dumps([(name, tensor.clone()) for name, tensor in tensors])).decode()
