"""The state of a run: one `State` of tables that change only their own rows.

- A table refuses an illegal change with an error before it changes anything.
- A change that may unblock parked requests is reported to the `Worklist`.
- Policies and transitions make the decisions; tables make none.
"""
