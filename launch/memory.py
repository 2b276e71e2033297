"""How much memory and disk a run will need, estimated from its configuration before it starts.

Sums of what is known to be there, in bytes, with the largest activations; not what an allocator makes of them. Enough
to tell a run that cannot fit from one that can.
"""

import json
import math
import struct
from dataclasses import dataclass
from pathlib import Path

from flowrt.errors import ConfigError
from flowrt.recipes.config import RunConfig

PROCESS_BYTES = 700 * 10**6
"""A process with torch and transformers in it, before it has loaded anything."""
SMALL_PROCESS_BYTES = 200 * 10**6
FLOAT_BYTES, HALF_BYTES, ADAM_BYTES, TOKEN_BYTES = 4, 2, 8, 12
DTYPE_BYTES = {"float64": 8, "float32": FLOAT_BYTES, "bfloat16": HALF_BYTES}
HEAD_DIM = 32
"""Of the embedded model."""
LAYER_TENSORS = 16
"""Activations of about the model's width that a layer keeps for the backward pass."""
DELTA_SNAPSHOTS = 2
"""The newest version, and the one before it, from which it is published as changes."""
ARRIVED = 2
"""Versions in a rollout worker, beside its model: the one that comes, and the one before it, which changes go into."""
SERVED_COPIES = 3
"""Of a version in a worker with an SGLang server: the one in use, the one that comes, the one that is handed over."""
SAVING_BYTES = 500 * 10**6
"""While a rank writes a file of a checkpoint: that twice (`flowrt.engines.state.FILE_BYTES`)."""
LONGEST_HEADER = 100 * 10**6


@dataclass(frozen=True)
class Shape:
    """The numbers of a model that memory depends on."""

    parameters: int
    layers: int
    hidden_size: int
    kv_size: int  # of the keys (or values) of one token in one layer
    vocab_size: int
    max_length: int
    intermediate_size: int

    @property
    def weight_bytes(self) -> int:
        """In float32, as the engines hold them."""
        return self.parameters * FLOAT_BYTES


@dataclass(frozen=True)
class Needs:
    """Bytes for each process of a role, and for what the run writes."""

    trainer_rank: int
    trainer_first: int  # rank 0, beside that
    trainer_device: int  # each rank, on its accelerator; in host memory where it has none
    rollout: int
    server: int  # of a rollout worker that starts one, on its accelerator; in host memory where it has none
    reference: int
    small: int  # controller, source and reward together, with the samples that are under way
    disk: int


def built_shape(config: RunConfig) -> Shape:
    """The embedded model's, as `engines/build.py` makes it."""
    build = config.build
    hidden, heads, kv_heads = build.hidden_size, build.heads, max(build.heads // 2, 1)
    attention = hidden * HEAD_DIM * (2 * heads + 2 * kv_heads) + 2 * HEAD_DIM
    layer = attention + 3 * hidden * build.intermediate_size + 2 * hidden
    parameters = build.vocab_size * hidden + build.layers * layer + hidden
    return Shape(
        parameters,
        build.layers,
        hidden,
        kv_heads * HEAD_DIM,
        build.vocab_size,
        build.max_length,
        build.intermediate_size,
    )


def read_shape(path: Path) -> Shape:
    """A checkpoint's. Raises ConfigError when its config.json is not that of a causal LM."""
    try:
        table = json.loads((path / "config.json").read_text())
        heads, hidden = int(table["num_attention_heads"]), int(table["hidden_size"])
        head_dim = int(table.get("head_dim") or hidden // heads)
        return Shape(
            sum(map(_parameters, sorted(path.glob("*.safetensors")))),
            int(table["num_hidden_layers"]),
            hidden,
            int(table.get("num_key_value_heads") or heads) * head_dim,
            int(table["vocab_size"]),
            int(table.get("max_position_embeddings", 0)),
            int(table.get("intermediate_size") or 4 * hidden),
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} has no config.json of a causal LM: {type(error).__name__} {error}") from None


def shape_of(config: RunConfig) -> Shape:
    """Of the model that this run starts from: the user's, or the one that is built."""
    return read_shape(Path(config.model)) if config.model else built_shape(config)


def accelerated(config: RunConfig, there: bool) -> tuple[bool, bool]:
    """Whether trainer ranks, and SGLang servers, work on an accelerator; ``there``: nodes have some."""
    trainer, sglang = config.trainer, config.rollout.sglang
    training = trainer.fsdp.device if trainer.engine == "fsdp" else "cpu"
    # A server that is running somebody else has made room for.
    generating = sglang.device if config.rollout.engine == "sglang" and not sglang.url else "cpu"
    return _is_accelerated(training, there), _is_accelerated(generating, there)


def _is_accelerated(device: str, there: bool) -> bool:
    return there if device in ("", "auto") else device != "cpu"


def model_bytes(config: RunConfig, shape: Shape) -> int:
    """Of parameters, gradients and optimiser on each rank: the tables in docs/engines.md."""
    trainer = config.trainer
    if trainer.engine != "fsdp":  # a step puts the gradients together into one tensor
        return shape.parameters * (3 * FLOAT_BYTES + ADAM_BYTES)
    narrow, wide = _narrow_bytes(config), _wide_bytes(config)
    adapters = _adapters(config, shape)
    held, trained = shape.parameters + adapters, adapters or shape.parameters
    shards = wide * held + 3 * wide * trained  # their gradients, both moments
    whole = narrow * held + wide * trained  # and their gradients
    return shards // trainer.ranks + (whole if trainer.fsdp.gather == "step" else whole // max(shape.layers, 1))


def estimate(config: RunConfig, shape: Shape) -> Needs:
    """What each process of this run will hold at its fullest."""
    weights, trainer, rollout = shape.weight_bytes, config.trainer, config.rollout
    logits = 2 * shape.vocab_size * FLOAT_BYTES  # and their gradient, or their softmax
    recompute = trainer.engine == "fsdp" and trainer.fsdp.recompute
    kept = shape.layers + LAYER_TENSORS if recompute else shape.layers * LAYER_TENSORS
    token = logits + kept * shape.hidden_size * _narrow_bytes(config)
    length = min(shape.max_length or config.build.max_length, config.build.max_length)
    cache = rollout.rows * length * shape.layers * 2 * shape.kv_size
    live = (config.staleness + 1) * config.prompts_per_step * config.group_size
    samples = live * (rollout.max_new_tokens + length) * TOKEN_BYTES
    adapters = _adapters(config, shape)
    published = _narrow_bytes(config) * _published(config, shape)
    # Swapped in flight, a second copy goes over what runs while the first goes on.
    copies = 2 if rollout.swap == "inflight" and rollout.recompute else 1
    generating = copies * (shape.parameters + adapters) * _narrow_bytes(config) + ARRIVED * published
    server = 0
    if rollout.engine == "sglang":
        generating = SERVED_COPIES * published
        width = FLOAT_BYTES if rollout.sglang.dtype == "float32" else HALF_BYTES
        server = 0 if rollout.sglang.url else (shape.parameters + cache) * width
    else:
        generating += copies * cache * _narrow_bytes(config) + rollout.rows * logits
    # The whole model is read, and written, by rank 0 alone where the others have shards.
    whole = _wide_bytes(config) * (shape.parameters + adapters) if trainer.engine == "fsdp" else 0
    saved = config.checkpoint.keep + 1 if config.checkpoint.every else 0
    return Needs(
        trainer_rank=PROCESS_BYTES + (SAVING_BYTES if saved else 0),
        trainer_first=max(whole, DELTA_SNAPSHOTS * published),
        trainer_device=model_bytes(config, shape) + trainer.forward_tokens * token,
        rollout=PROCESS_BYTES + generating + samples,
        server=server,
        reference=PROCESS_BYTES + weights + trainer.forward_tokens * logits,
        small=SMALL_PROCESS_BYTES + 2 * PROCESS_BYTES + samples,
        disk=saved * (adapters or shape.parameters) * (FLOAT_BYTES + ADAM_BYTES) + 2 * weights,
    )


def host_bytes(config: RunConfig, needs: Needs, nodes: int, devices: bool = False) -> int:
    """What the fullest node holds: all of the run where its workers start here, else the largest part of it.

    ``devices``: nodes have accelerators. What lies on one does not lie in host memory.
    """
    trainer, reference = config.trainer, needs.reference if config.loss.kl_coef > 0 else 0
    training, serving = accelerated(config, devices)
    rank = needs.trainer_rank + (0 if training else needs.trainer_device)
    part = trainer.ranks // trainer.nodes * rank + needs.trainer_first
    rollout = needs.rollout + (0 if serving else needs.server)
    head = needs.small + reference
    generating = math.ceil(config.rollout.workers / max(nodes - trainer.nodes, 1)) * rollout
    away = bool(config.launch.rollout), bool(config.launch.trainer)
    here = head + (0 if away[0] else config.rollout.workers * rollout) + (0 if away[1] else part)
    # With trainers elsewhere, the controller's host is most often one of theirs.
    return max(here + part if away[1] else here, generating if away[0] else 0)


def device_bytes(config: RunConfig, needs: Needs, devices: bool) -> int:
    """What the largest process on an accelerator needs of it; 0 where none works on one."""
    training, serving = accelerated(config, devices)
    return max(needs.trainer_device if training else 0, needs.server if serving else 0)


def _narrow_bytes(config: RunConfig) -> int:
    """Of a parameter in passes, and published."""
    return DTYPE_BYTES[config.trainer.fsdp.dtype] if config.trainer.engine == "fsdp" else FLOAT_BYTES


def _wide_bytes(config: RunConfig) -> int:
    """Of the optimiser's own parameter, and of a gradient."""
    return max(_narrow_bytes(config), FLOAT_BYTES)


def _adapters(config: RunConfig, shape: Shape) -> int:
    """How many numbers the adapters have, at most: one at each linear layer; 0 where there are none."""
    rank = config.trainer.lora.rank if config.trainer.engine == "fsdp" else 0
    hidden, wide = shape.hidden_size, shape.intermediate_size
    attention = 2 * (hidden + hidden) + 2 * (hidden + shape.kv_size)
    return rank * shape.layers * (attention + 3 * (hidden + wide))


def _published(config: RunConfig, shape: Shape) -> int:
    """How many numbers a version has."""
    adapters = _adapters(config, shape)
    return adapters if adapters and config.trainer.lora.publish == "adapters" else shape.parameters


def _parameters(path: Path) -> int:
    """How many numbers a safetensors file holds, by its header alone."""
    with path.open("rb") as file:
        (size,) = struct.unpack("<Q", file.read(8))
        if size > LONGEST_HEADER:
            raise ValueError(f"{path.name} is no safetensors file")
        header = json.loads(file.read(size))
    return sum(math.prod(entry["shape"]) for name, entry in header.items() if name != "__metadata__")
