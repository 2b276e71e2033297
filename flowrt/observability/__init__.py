"""Observability: readers of a run directory, live, finished, killed or half-copied, and what is shown of them.

- Everything here only reads a run directory; the controller is the only writer of its files.
- A missing or damaged file costs what it holds, with a sentence that names it, and nothing else.
- The page of a live run and of a finished one have the same reader and show the same numbers.
"""
