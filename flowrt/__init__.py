"""flowrt: an asynchronous streaming runtime for the RL post-training of language models.

Importing this package loads no torch; each subpackage imports what it needs.
"""

import sys

if sys.argv[:1] == ["-m"] and not sys.flags.safe_path:
    _started = sys.orig_argv[sys.orig_argv.index("-m") + 1] if "-m" in sys.orig_argv else ""
    if _started.partition(".")[0] == __name__:
        # python -m flowrt… searches the current directory first, where a file json.py would hide the module of Python.
        del sys.path[0]

__version__ = "0.1.0"
__all__ = ["__version__"]
