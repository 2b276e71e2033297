"""Simulated engines, which take the time of real engines and compute nothing, to measure schedules and policies.

- Durations are simulated seconds of a `SimClock`, in scaled real time or on a manual clock.
- Outputs are zeros with the shapes and dtypes of real outputs, so stores and lanes carry as many bytes.
"""
