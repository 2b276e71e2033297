"""Stands in for SGLang's kernel package on a machine without CUDA: its CPU build is not on the package index.

SGLang imports some kernels by name when it runs on a CPU and then finds that no operator is registered, so attention,
norms and sampling take its plain PyTorch paths. A kernel that is still called raises NotImplementedError.
"""

from collections.abc import Callable
from typing import NoReturn

import torch

__version__ = "0.0.0+standin"

if not torch.backends.cuda.is_built():
    # SGLang calls this before and after it computes the checksums of its weights, on a CPU as well.
    torch.cuda.synchronize = lambda *_: None


def __getattr__(name: str) -> Callable[..., NoReturn]:
    if not name.endswith("_cpu"):
        raise AttributeError(f"the stand-in for sgl_kernel has no {name}")

    def absent(*args: object, **options: object) -> NoReturn:
        raise NotImplementedError(f"sgl_kernel.{name} needs SGLang's kernel package; this is the stand-in for CPUs")

    return absent
