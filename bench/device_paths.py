"""What an accelerator would be asked to do, counted without one: operations, waits of the host, pinned memory.

    python bench/device_paths.py [--parts operations reads pinned activations] [--quick] [--json PATH]

Launches and waits, not arithmetic, bound small models on a device. Operations are those of torch that compute or copy,
as a dispatch mode sees them on the CPU: each is at least one kernel on a device. Waits are those of the simulated
device of the tests.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from common.harness import ROOT, Bench, Figures, Options, Part
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
)

from flowrt.algorithms.objective import Objective
from flowrt.engines.base import Prompt, TrainingBatch
from flowrt.engines.descriptor import ALLOCATOR_OVERHEAD, PassSize
from flowrt.engines.options import TrainOptions
from flowrt.engines.stopping import StopConditions
from flowrt.engines.torch.rollout import TorchRollout
from flowrt.engines.torch.trainer import TorchTrainer
from flowrt.engines.training.forward import enable_packing, is_packing_enabled, packed_predictions
from flowrt.launcher.doctor.model_shape import read_shape
from flowrt.transport.buffers import PinnedPool
from flowrt.transport.weights.snapshot import _grouped

READS_S = 600.0
READS = """
import sys
sys.path[:0] = {paths!r}
from tests.simulated_device import without_inference_mode
without_inference_mode()
from common.device_reads import main
main()
"""
CREATING = ("aten::empty", "aten::new_empty", "aten::detach", "aten::lift_fresh", "aten::_unsafe_view")
"""Operations that start nothing on a device, besides views."""
SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
FAMILIES: Mapping[str, Callable[[int], Any]] = {
    "llama": lambda layers: LlamaConfig(**SIZES, num_hidden_layers=layers),
    "mistral": lambda layers: MistralConfig(**SIZES, num_hidden_layers=layers, sliding_window=None),
    "qwen2": lambda layers: Qwen2Config(**SIZES, num_hidden_layers=layers),
    "qwen3": lambda layers: Qwen3Config(**SIZES, num_hidden_layers=layers, head_dim=128),
    "gemma3": lambda layers: Gemma3TextConfig(**SIZES, num_hidden_layers=layers, head_dim=128),
    "gpt2": lambda layers: GPT2Config(
        vocab_size=64, n_embd=256, n_layer=layers, n_head=4, n_positions=1024, bos_token_id=1, eos_token_id=1
    ),
}
QWEN_7B = {"layers": 28, "hidden": 3584, "keys": 512, "inner": 18_944, "vocabulary": 152_064}


class Counting(TorchDispatchMode):
    """Counts operations that compute or copy, also those of backward passes."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        returned = [value.alias_info for value in func._schema.returns]
        is_view = any(alias is not None and not alias.is_write for alias in returned)
        self.count += not (is_view or func._schema.name.startswith(CREATING))
        return func(*args, **(kwargs or {}))


def built(config: Any, dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).to(dtype)


def decode_operations(layers: int) -> int:
    """Operations of an eager decode step of two sequences."""
    rollout = TorchRollout(
        built(FAMILIES["qwen3"](layers)).eval(), stop=StopConditions(), rows=2, max_new_tokens=8, temperature=1.0
    )
    rollout.add([Prompt(key, torch.tensor([4, 5, 6], dtype=torch.int32), key) for key in range(2)])
    rollout._prefill()
    counting = Counting()
    with torch.inference_mode(), counting:
        rollout._decode()
        rollout._remove_finished()
    return counting.count


def training_operations(layers: int) -> int:
    """Operations of the forward and backward pass over a group of samples of equal lengths."""
    trainer = TorchTrainer(
        built(FAMILIES["qwen3"](layers)), TrainOptions(lr=1e-3, forward_tokens=4096), Objective(), temperature=1.0
    )
    count, length = 4, 16
    batch = TrainingBatch(
        prompts=[torch.arange(2, 10)] * count,
        responses=[torch.arange(2, 2 + length)] * count,
        rollout_logprobs=[torch.full((length,), -4.0)] * count,
        reference_logprobs=None,
        advantages_N=torch.ones(count),
        weights_N=torch.ones(count),
        groups_N=torch.zeros(count, dtype=torch.int64),
    )
    trainer.accumulate(batch)  # makes the gradients
    counting = Counting()
    with counting:
        trainer.accumulate(batch)
    return counting.count


def operations(_: Options) -> Figures:
    """Operations a layer of a decode step, and of a training pass forward and backward; and those besides layers."""
    decode, training = ([of(layers) for layers in (1, 3)] for of in (decode_operations, training_operations))
    return {
        "ops_decode": (decode[1] - decode[0]) / 2,
        "ops_decode_rest": (3 * decode[0] - decode[1]) / 2,
        "ops_train": (training[1] - training[0]) / 2,
        "ops_train_rest": (3 * training[0] - training[1]) / 2,
    }


def reads(_: Options) -> Figures:
    """Waits of the host for a device: a decode step, a training pass, a step besides its passes, a scored batch."""
    code = READS.format(paths=[str(ROOT / "bench"), str(ROOT)])
    completed = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=READS_S
    )
    if completed.returncode:
        raise RuntimeError(completed.stderr)
    figures: dict[str, float] = json.loads(completed.stdout.splitlines()[-1])
    return figures


def pinned(_: Options) -> Figures:
    """Bytes registered with a device for a version over its own bytes, with the shapes of Qwen2.5-7B in bfloat16."""
    hidden, keys, inner = (QWEN_7B[name] for name in ("hidden", "keys", "inner"))
    layer = [(hidden, hidden), (keys, hidden), (keys, hidden), (hidden, hidden), *3 * [(inner, hidden)], (hidden,)]
    shapes = [*QWEN_7B["layers"] * layer, *2 * [(QWEN_7B["vocabulary"], hidden)]]
    tensors = {
        str(place): torch.empty(shape, dtype=torch.bfloat16, device="meta") for place, shape in enumerate(shapes)
    }
    pool = PinnedPool(lambda *_: None)
    buffers = [pool.take(sum(tensor.nbytes for tensor in group)) for group in _grouped(tensors)]
    return {"pinned_ratio": pool.registered_bytes / sum(buffer.nbytes for buffer in buffers)}


def kept_bytes(config: Any, group: int, length: int) -> int:
    """Bytes of activations that a packed pass in bfloat16 keeps for its backward pass."""
    model = built(config, torch.bfloat16).eval()  # as it is trained: without dropout
    enable_packing(model)
    weights = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    storages: dict[int, int] = {}
    alive = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            storages[storage.data_ptr()] = storage.nbytes()
            alive.append(tensor)  # its address would be given again
        return tensor

    prompts, responses = [torch.tensor([2])] * group, [torch.full((length,), 3)] * group
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        if is_packing_enabled(model):
            packed_predictions(model, prompts, responses, 1.0, native_attention=True)
        else:
            tokens = torch.cat([prompts[0], responses[0][:-1]]).expand(group, -1)
            model(input_ids=tokens, use_cache=False, logits_to_keep=1)
    return sum(storages.values())


def estimate_ratio(make: Callable[[int], Any], tokens: int) -> float:
    """The estimate of the activations of a layer over those that autograd keeps."""
    group, length = 4, tokens // 4
    measured = kept_bytes(make(2), group, length) - kept_bytes(make(1), group, length)
    with tempfile.TemporaryDirectory() as folder:
        built(make(2)).save_pretrained(folder)
        shape = read_shape(Path(folder))
    sizes = [replace(shape, layers=layers) for layers in (2, 1)]
    whole = PassSize(sample=length, packed=group * length, attended=group * length, predicted=1)
    estimated = [size.kept_bytes(whole, "bfloat16") for size in sizes]
    return (estimated[0] - estimated[1]) / ALLOCATOR_OVERHEAD / measured


def activations(options: Options) -> Figures:
    """The estimate of activations over what autograd keeps, a layer in bfloat16; the least and most of six families."""
    tokens = 64 if options.quick else 1024
    ratios = {f"activation_estimate_{name}": estimate_ratio(make, tokens) for name, make in FAMILIES.items()}
    return {
        **ratios,
        "activation_estimate_min": min(ratios.values()),
        "activation_estimate_max": max(ratios.values()),
    }


PARTS: dict[str, Part] = {
    "operations": operations,
    "reads": reads,
    "pinned": pinned,
    "activations": activations,
}
BENCH = Bench(
    about=__doc__,
    parts=PARTS,
    most={
        "ops_decode": 25,
        "ops_train": 120,
        "reads_decode": 1,
        "reads_pass": 0,
        "reads_pass_fused": 1,
        "reads_step": 2,
        "reads_reference": 1,
        "pinned_ratio": 1.02,
        "activation_estimate_max": 1.1,
    },
    least={"activation_estimate_min": 0.9},
)

if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(BENCH.main())
