"""A load of weights that reports missing tensors, in vLLM's workers (``--worker-extension-cls``)."""

from collections.abc import Iterable, Iterator
from typing import Any

HEAD, EMBEDDING = "ParallelLMHead", "VocabParallelEmbedding"
"""Classes of vLLM: of the output head, and of the embedding of tokens."""


class FlowrtWeights:
    """Methods that vLLM adds to the class of its workers."""

    model_runner: Any
    reload_weights: Any

    def flowrt_load(self, directory: str) -> list[str]:
        """Load the checkpoint in a directory. Returns the names of the model's parameters that it lacks.

        vLLM itself loads what is there, and logs what is not. On a CPU it leaves a head that is tied to the embedding
        as it was, because the head has a copy of it in another layout: the embedding is loaded into the head too.
        """
        model = self.model_runner.get_model()
        load_weights, loaded = model.load_weights, set[str]()
        tied = _tied_heads(model)

        def recorded(weights: Iterable[tuple[str, Any]]) -> Any:
            embeddings: list[Any] = []
            names = load_weights(_kept(weights, _embedding_suffix(model), embeddings))
            loaded.update(names or ())
            for name, head in tied.items() if embeddings else ():
                head.weight.weight_loader(head.weight, embeddings[0])
                loaded.add(f"{name}.weight")
            return names

        model.load_weights = recorded  # hides the method of the class
        try:
            self.reload_weights(weights_path=directory)
        finally:
            del model.load_weights
        expected = {name for name, _ in model.named_parameters()} | {f"{name}.weight" for name in tied}
        return sorted({name.replace(".base_layer", "") for name in expected} - loaded)


def _tied_heads(model: Any) -> dict[str, Any]:
    """The output heads of a model that have the embedding's values, by name; not one that is the embedding itself."""
    config = getattr(model.config, "get_text_config", lambda: model.config)()
    if not getattr(config, "tie_word_embeddings", False):
        return {}
    return {name: module for name, module in model.named_modules() if type(module).__name__ == HEAD}


def _embedding_suffix(model: Any) -> str:
    """The end of the name of the embedding's tensor in a checkpoint, such as ``embed_tokens.weight``."""
    names = [name for name, module in model.named_modules() if type(module).__name__ == EMBEDDING]
    return f"{names[0].rpartition('.')[2]}.weight" if names else ""


def _kept(weights: Iterable[tuple[str, Any]], suffix: str, embeddings: list[Any]) -> Iterator[tuple[str, Any]]:
    """The same tensors; the one of the embedding is added to ``embeddings``."""
    for name, tensor in weights:
        if suffix and name.endswith(suffix):
            embeddings.append(tensor)
        yield name, tensor
