"""The tensor store of a worker: rows of columns, by slot or group.

- Used on the event loop's thread only.
- Rows that do not fit the budget raise OverBudget and change nothing.
"""
