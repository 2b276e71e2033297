"""The workers of a run. None needs the web: what they load is in directories that the run names.

Said here, before everything that a worker imports: Hugging Face's libraries look once, when they are loaded.
"""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
