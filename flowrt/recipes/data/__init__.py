"""Data sets of prompts: files and directories of rows, read on demand, and what a row must have.

- Nothing is downloaded, and no code that comes with a data set is run.
- A mistake is reported with file, line and field; the first ten of a data set together.
"""
