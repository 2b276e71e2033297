"""Tasks: prompts and their reward.

- A task is an object (`base.Task`); workers that make it from the same configuration get the same prompts and rewards.
- A new built-in task is a module with a `base.Recipe`, and a row in the table of `registry`.
- Held-out rows are not trained on. Recipe custom and task files also refuse equal prompts (``data.allow_overlap``).
"""
