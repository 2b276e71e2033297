"""Master parameters: mixed precision of the torch training engine (arXiv 1710.03740, section 3.1).

The model computes in a narrow dtype. The optimiser updates a copy of its parameters in a wide one, in which gradients
are accumulated too: updates far smaller than a parameter, and the sum of many gradients, would be lost to rounding.
"""

from typing import Any

import torch


class MasterParameters:
    """The parameters of a model, in whose place it gets narrow ones. Tied ones stay tied.

    Args:
        model: with parameters in the wide dtype. Buffers, such as the frequencies of rotary embeddings, keep theirs.
        narrow: dtype of forward and backward passes.
    """

    def __init__(self, model: Any, narrow: torch.dtype) -> None:
        self._of: dict[torch.nn.Parameter, torch.nn.Parameter] = {}
        narrowed: dict[torch.nn.Parameter, torch.nn.Parameter] = {}
        for module in list(model.modules()):
            for name, master in list(module.named_parameters(recurse=False)):
                if master not in narrowed:
                    narrowed[master] = torch.nn.Parameter(
                        master.detach().to(narrow), requires_grad=master.requires_grad
                    )
                setattr(module, name, narrowed[master])
        for master, parameter in narrowed.items():
            if parameter.requires_grad:
                self._of[parameter] = master
                parameter.register_post_accumulate_grad_hook(self._accumulate)

    def of(self, parameter: torch.nn.Parameter) -> torch.nn.Parameter:
        """The master of a trainable parameter."""
        return self._of[parameter]

    @torch.no_grad()
    def write(self) -> None:
        """Round the masters into the model."""
        for parameter, master in self._of.items():
            parameter.copy_(master)

    @torch.no_grad()
    def _accumulate(self, parameter: torch.Tensor) -> None:
        """Add a parameter's new gradient to that of its master."""
        assert isinstance(parameter, torch.nn.Parameter)
        assert parameter.grad is not None
        master = self._of[parameter]
        if master.grad is None:
            master.grad = parameter.grad.to(master.dtype)
        else:
            master.grad += parameter.grad
        parameter.grad = None
