"""Tensors in the only form that SGLang takes them within a request: a pickle of names and tensors, in base64.

This is the one place in flowrt that writes a pickle, and nothing in flowrt ever reads one. Whoever does not want that
on the wire takes another way for the weights (``rollout.sglang.weights``).
"""

import base64
import pickle
from collections.abc import Sequence

import torch


def serialized(tensors: Sequence[tuple[str, torch.Tensor]]) -> str:
    """Each tensor with storage of its own: a view would bring all of its bucket along."""
    return base64.b64encode(pickle.dumps([(name, tensor.clone()) for name, tensor in tensors])).decode()
