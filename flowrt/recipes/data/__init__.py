"""Data sets of prompts: files and directories of rows, read on demand, and what a row must have.

- Nothing is downloaded, and no code that comes with a data set is run.
- An error in a row is reported with file, line and field; the first ten of a data set are reported together.
"""
