"""Reward functions in processes of their own: which there are, how they are called, and what comes of a call.

- `functions` names them, `signature` and `result` are their contract, `scoring` makes one number of several.
- `pool` runs them in child processes (`guard`, `child`); a hung or dying call costs its own outcome and nothing else.
- No module here imports torch; a user's file is imported in a child only.
"""
