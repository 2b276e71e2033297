"""Reward functions in separate processes: which functions there are, how they are called, and their outcomes.

- `functions` parses their names, `user_file` calls functions of the user, `built_in`, `code` and `remote` have the
  others, `outcomes` the results of calls, and `scoring` combines several functions into one reward.
- `pool` runs them in child processes (`guard`, `child`); a call that hangs or dies affects its own outcome only.
- No module here imports torch; a user's file is imported in a child only.
"""
