"""The state of a run: one `State` of tables that change only their own rows.

- A table refuses an illegal change with an error before it changes anything.
- What a change makes possible is reported to the `Worklist`; no other object keeps such a flag.
- Tables make no decision: policies and transitions do.
"""
