"""Simulation of runs in virtual time, with the production state machine: for planning, and for authors of policies.

- `cluster` runs a real `Core` with simulated workers, through rollout, training and weight sync.
- `dispatch` runs a real dispatch queue alone, through synchronous steps of generation.
- Simulated workers take time and compute nothing; a run of hours on thousands of workers takes seconds.
- Nothing is random: the same plan gives the same events in the same order.
- A policy that makes progress impossible raises AssertionError; nothing waits.
"""
