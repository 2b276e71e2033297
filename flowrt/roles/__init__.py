"""Worker roles: source, rollout, reward, reference and trainer.

- A role is a coroutine function of a `Session` and a `RunConfig`; `main` adds the process, its signals and its exit
  code.
- A role is a stage of the dataflow: it pulls slots and commits columns. So a reward goes from the reward worker's
  commit to the slot (`flowrt.controller.transitions.commits`), and with the grant of its group to the trainer
  (`flowrt.controller.transitions.pulls`, `trainer.to_training_batch`).
- Roles do not communicate directly: all metadata goes through the session, tensors through its lanes.
- Workers are offline: models, tokenizers and data are read from directories of the run. Hugging Face libraries read
  HF_HUB_OFFLINE once, at import, so this package sets it first.
"""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
