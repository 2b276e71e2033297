"""Dispatch policies: which worker gets which ready slots.

- A queue holds a ready slot at most once, and `take` removes what it returns.
- The default serves in order of issue, never in order of completion.
- Every other policy bounds how many later slots can be served before a slot that may start.
"""
