"""Writes the policy of a checkpoint as the model of another run.

``python -m flowrt.launcher.checkpoint_model --config RUN/config.toml --checkpoint DIR --source MODEL``: writes a
copy of MODEL with the weights of the checkpoint, in the dtype of the optimiser's, to the model directory of the
configuration. Exit code 2 and one sentence if that fails.
"""

import argparse
import logging
import os
import sys
from pathlib import Path

from safetensors import SafetensorError

from flowrt.engines.exported_model import complete, write_checkpoint
from flowrt.errors import EXIT_BAD_INPUT, FlowError
from flowrt.recipes.config_io import from_file
from flowrt.runtime.standard_streams import log_to_stderr

log = logging.getLogger("flowrt")


def main() -> int:
    parser = argparse.ArgumentParser(description="the policy of a checkpoint as a model")
    parser.add_argument("--config", required=True, type=Path, help="config.toml of the run that the model is for")
    parser.add_argument("--checkpoint", required=True, type=Path, help="a checkpoint of another run")
    parser.add_argument("--source", required=True, type=Path, help="the model that the other run started from")
    arguments = parser.parse_args()
    log_to_stderr()
    try:
        config = from_file(arguments.config)
        directory, lora = Path(config.model), config.trainer.lora
        write_checkpoint(arguments.checkpoint, arguments.source, directory, lora=lora, wanted="state")
        complete(directory, arguments.source, config.data.chat_template)
    except (FlowError, OSError, SafetensorError) as error:
        log.error("checkpoint %s cannot be evaluated: %s", arguments.checkpoint, error)
        return EXIT_BAD_INPUT
    return 0


if __name__ == "__main__":
    sys.stdout.flush()
    os._exit(main())
