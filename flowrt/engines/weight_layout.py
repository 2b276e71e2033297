"""How the weights of a model that decodes lie in memory: as a CPU multiplies a few rows by them fastest."""

from typing import Any

import torch


def laid_out_for_decoding(model: Any) -> Any:
    """The model; the weight of a linear layer lies in memory input after input now, where that is faster.

    It keeps its shape, [outputs, inputs], and its numbers. Faster it is in float32 on a CPU, whose product of 4 to 128
    rows with such a weight takes 0.5 to 0.95 of the time; other types are packed anew for each product, however they
    lie. Not for a model that is trained, whose other products want them as they were, nor for weights that an embedding
    reads as well.
    """
    layers = [module for module in model.modules() if isinstance(module, torch.nn.Linear)]
    others = (module for module in model.modules() if not isinstance(module, torch.nn.Linear))
    shared = {id(parameter) for module in others for parameter in module.parameters(recurse=False)}
    for layer in layers:
        weight = layer.weight
        if weight.is_cpu and weight.dtype is torch.float32 and id(weight) not in shared:
            weight.data = weight.detach().t().contiguous().t()
    return model
