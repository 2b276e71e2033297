"""Diagnostics of a run: wait-for graph, status for observers, health warnings, invariants.

- These modules only read the controller's state.
- The number of workers and waits in a status for observers is limited.
- A deadlock is reported only if each of its workers has to wait for another one of it.
"""
