"""Reward functions in separate processes: which functions there are, how they are called, and their outcomes.

- `reward_names` parses their names, `user_reward` calls those of the user (`user_file` loads them), `built_in`, `code`
  and `remote` have the others.
- `call_forms` is what they are called with, `rows` the columns of a row, `outcomes` the results of calls, and `scoring`
  combines several functions into one reward.
- `pool` runs them in child processes (`reward_process`, `reaper`, `child`), async ones together (`async_calls`); a call
  that hangs or dies affects its own outcome only.
- No module here imports torch; a user's file is imported in a child only.
"""
