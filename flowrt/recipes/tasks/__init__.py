"""Tasks: prompts and their reward.

- A task is one object (`base.Task`), the same in every worker that makes it from the same configuration.
- A new task is its own file with a `base.Recipe`, and a row in the table of `registry`.
- Held-out problems are never training problems.
"""
