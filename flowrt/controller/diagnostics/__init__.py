"""Diagnostics of a run: wait-for graph, status for observers, invariant checks, and limits on reported names.

- All of it only reads the controller's state.
- What is sent to observers is bounded in size, however many workers and waits there are.
- A deadlock is reported only if no worker in it can act without another one in it.
"""
