"""Launcher: starts and supervises runs on this host and others; commands and views of a running job.

- Bad input is found before a process starts or a file is written: exit code 2 and one sentence.
- No process outlives its launcher.
- Processes of a run are offline: Hugging Face libraries read HF_HUB_OFFLINE once, at import, so it is set here first.
"""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
