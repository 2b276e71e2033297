"""flowrt: an asynchronous streaming runtime for the RL post-training of language models.

Importing this package loads no torch; each subpackage imports what it needs.
"""

__version__ = "0.1.0"
__all__ = ["__version__"]
