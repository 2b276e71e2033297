"""Writes the policy of a checkpoint as the model of another run.

``python -m flowrt.launcher.checkpoint_model --config RUN/config.toml --checkpoint DIR --source MODEL``: writes a
copy of MODEL with the weights of the checkpoint to the model directory of the configuration. Exit code 2 and one
sentence if that fails.
"""

import argparse
import logging
import os
import sys
from pathlib import Path

from safetensors import SafetensorError

from flowrt.engines.hf import write_policy
from flowrt.engines.training.state import read_tensors
from flowrt.errors import EXIT_BAD_INPUT, FlowError
from flowrt.recipes.config_io import from_file
from flowrt.runtime.logs import log_to_stderr

log = logging.getLogger("flowrt")
MODEL_PREFIX = "model."
"""Prefix of the names of the policy's parameters in a checkpoint of a training engine."""


def main() -> int:
    parser = argparse.ArgumentParser(description="the policy of a checkpoint as a model")
    parser.add_argument("--config", required=True, type=Path, help="config.toml of the run that the model is for")
    parser.add_argument("--checkpoint", required=True, type=Path, help="a checkpoint of another run")
    parser.add_argument("--source", required=True, type=Path, help="the model that the other run started from")
    arguments = parser.parse_args()
    log_to_stderr()
    try:
        state = read_tensors(arguments.checkpoint)
        tensors = {name.removeprefix(MODEL_PREFIX): one for name, one in state.items() if name.startswith(MODEL_PREFIX)}
        write_policy(arguments.source, tensors, Path(from_file(arguments.config).model))
    except (FlowError, OSError, SafetensorError) as error:
        log.error("checkpoint %s cannot be evaluated: %s", arguments.checkpoint, error)
        return EXIT_BAD_INPUT
    return 0


if __name__ == "__main__":
    sys.stdout.flush()
    os._exit(main())
