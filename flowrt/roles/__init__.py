"""Worker roles: source, rollout, reward, reference and trainer.

- A role is a coroutine function of a `Session` and a `RunConfig`; `main` adds the process, its signals and its exit
  code.
- Roles do not communicate directly: all metadata goes through the session, tensors through its lanes.
- Workers are offline: models, tokenizers and data are read from directories of the run. Hugging Face libraries read
  HF_HUB_OFFLINE once, at import, so this package sets it first.
"""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
