"""Simulated engines, which take the time of real ones and compute nothing, to measure schedules and policies.

- Durations are simulated seconds of a `SimClock`, in scaled real time or on a manual clock.
- Outputs have the shapes and dtypes of real ones (all zeros), so stores and lanes carry real bytes.
"""
