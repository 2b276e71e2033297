"""Observability: readers of a run directory (live, finished, killed or partly copied), and the views of it.

- Everything here only reads a run directory; the controller is the only writer of its files.
- If a file is missing or damaged, only its content is missing in the answers, and a sentence names the file.
- The pages of a live run and of a finished one have the same reader and show the same numbers.
"""
