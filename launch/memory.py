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
FLOAT_BYTES, ADAM_BYTES, TOKEN_BYTES = 4, 8, 12
HEAD_DIM = 32
"""Of the embedded model."""
LAYER_TENSORS = 16
"""Activations of about the model's width that a layer keeps for the backward pass."""
DELTA_SNAPSHOTS = 2
"""The newest version, and the one before it, from which it is published as changes."""
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

    @property
    def weight_bytes(self) -> int:
        """In float32, as the engines hold them."""
        return self.parameters * FLOAT_BYTES


@dataclass(frozen=True)
class Needs:
    """Bytes for each process of a role, and for what the run writes."""

    trainer_rank: int
    trainer_device: int  # of the above, what is on the rank's accelerator where it has one
    rollout: int
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
    return Shape(parameters, build.layers, hidden, kv_heads * HEAD_DIM, build.vocab_size, build.max_length)


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
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} has no config.json of a causal LM: {type(error).__name__} {error}") from None


def shape_of(config: RunConfig) -> Shape:
    """Of the model that this run starts from: the user's, or the one that is built."""
    return read_shape(Path(config.model)) if config.model else built_shape(config)


def estimate(config: RunConfig, shape: Shape) -> Needs:
    """What each process of this run will hold at its fullest."""
    weights, trainer = shape.weight_bytes, config.trainer
    logits = 2 * shape.vocab_size * FLOAT_BYTES  # and their gradient, or their softmax
    token = logits + shape.layers * LAYER_TENSORS * shape.hidden_size * FLOAT_BYTES
    state = 2 * weights + shape.parameters * ADAM_BYTES  # parameters, gradients, both moments
    if trainer.engine == "fsdp":
        state = state // trainer.ranks + (weights if trainer.fsdp.gather == "step" else weights // max(shape.layers, 1))
    device = state + trainer.forward_tokens * token
    length = min(shape.max_length or config.build.max_length, config.build.max_length)
    cache = config.rollout.rows * length * shape.layers * 2 * shape.kv_size * FLOAT_BYTES
    live = (config.staleness + 1) * config.prompts_per_step * config.group_size
    samples = live * (config.rollout.max_new_tokens + length) * TOKEN_BYTES
    kept = config.checkpoint.keep + 1 if config.checkpoint.every else 0
    return Needs(
        trainer_rank=PROCESS_BYTES + device + DELTA_SNAPSHOTS * weights,
        trainer_device=device,
        rollout=PROCESS_BYTES + 2 * weights + cache + config.rollout.rows * logits + samples,
        reference=PROCESS_BYTES + weights + trainer.forward_tokens * logits,
        small=SMALL_PROCESS_BYTES + 2 * PROCESS_BYTES + samples,
        disk=kept * (weights + shape.parameters * ADAM_BYTES) + 2 * weights,
    )


def host_bytes(config: RunConfig, needs: Needs, nodes: int) -> int:
    """What the fullest node holds: all of the run where its workers start here, else the largest part of it."""
    trainer, reference = config.trainer, needs.reference if config.loss.kl_coef > 0 else 0
    part = trainer.ranks // trainer.nodes * needs.trainer_rank
    head = needs.small + reference
    generating = math.ceil(config.rollout.workers / max(nodes - trainer.nodes, 1)) * needs.rollout
    away = bool(config.launch.rollout), bool(config.launch.trainer)
    here = head + (0 if away[0] else config.rollout.workers * needs.rollout) + (0 if away[1] else part)
    # With trainers elsewhere, the controller's host is most often one of theirs.
    return max(here + part if away[1] else here, generating if away[0] else 0)


def _parameters(path: Path) -> int:
    """How many numbers a safetensors file holds, by its header alone."""
    with path.open("rb") as file:
        (size,) = struct.unpack("<Q", file.read(8))
        if size > LONGEST_HEADER:
            raise ValueError(f"{path.name} is no safetensors file")
        header = json.loads(file.read(size))
    return sum(math.prod(entry["shape"]) for name, entry in header.items() if name != "__metadata__")
