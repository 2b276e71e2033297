"""A load of weights that reports missing tensors, in vLLM's workers (``--worker-extension-cls``)."""

from collections.abc import Iterable
from typing import Any


class FlowrtWeights:
    """Methods that vLLM adds to the class of its workers."""

    model_runner: Any
    reload_weights: Any

    def flowrt_load(self, directory: str) -> list[str]:
        """Load the checkpoint in a directory. Returns the names of the model's parameters that it lacks.

        vLLM itself loads what is there, and logs what is not.
        """
        model = self.model_runner.get_model()
        load_weights, loaded = model.load_weights, set[str]()

        def recorded(weights: Iterable[tuple[str, Any]]) -> Any:
            names = load_weights(weights)
            loaded.update(names or ())
            return names

        model.load_weights = recorded  # hides the method of the class
        try:
            self.reload_weights(weights_path=directory)
        finally:
            del model.load_weights
        return sorted({name.replace(".base_layer", "") for name, _ in model.named_parameters()} - loaded)
