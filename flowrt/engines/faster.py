"""What makes a training model's passes faster and leaves what they compute as it is."""

from typing import Any

from flowrt.engines.folded_attention import use_folded
from flowrt.engines.options import TrainOptions


def made_fast(model: Any, options: TrainOptions) -> Any:
    """The model, as the options want it. All ranks of a sharded model call this together."""
    if options.share_prompts:
        use_folded(model)
    if options.compile:
        for layer in decoder_layers(model):
            for module in layer.modules():
                # Else whole numbers of a module that FSDP2 has sharded, such as the width of its heads, are compiled as
                # ones that change. Its parameters are whole when it runs, and FSDP2 itself does not read this.
                module._is_fsdp_managed_module = False
            layer.compile(dynamic=True)
    return model


def decoder_layers(model: Any) -> list[Any]:
    """What transformers says is not to be split over devices: the decoder layers, in most models."""
    names = set(getattr(model, "_no_split_modules", None) or ())
    # FSDP2 gives what it has sharded a class of its own.
    return [module for module in model.modules() if type(module).__name__.removeprefix("FSDP") in names]
