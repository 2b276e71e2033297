"""The public API for tasks of your own: what a file for ``flowrt run FILE.py`` imports.

- `examples/own_task.py` is a complete task.
- Every name in ``__all__`` is stable; the modules that it comes from are not.
- The built-in tasks are such files too; a copy of a built-in file defines the same task.
"""

from flowrt.errors import ConfigError
from flowrt.recipes.algorithm_config import AlgorithmConfig, KlConfig
from flowrt.recipes.config import BuildConfig, RolloutConfig, RunConfig, SftConfig, TrainerConfig
from flowrt.recipes.data_config import DataConfig, EvalConfig
from flowrt.recipes.tasks.base import Example, Recipe, Task
from flowrt.recipes.tasks.embedded_tokenizers import byte_pair_tokenizer, character_tokenizer
from flowrt.recipes.tasks.rows import Row, read_rows

__all__ = [
    "AlgorithmConfig",
    "BuildConfig",
    "ConfigError",
    "DataConfig",
    "EvalConfig",
    "Example",
    "KlConfig",
    "Recipe",
    "RolloutConfig",
    "Row",
    "RunConfig",
    "SftConfig",
    "Task",
    "TrainerConfig",
    "byte_pair_tokenizer",
    "character_tokenizer",
    "read_rows",
]
