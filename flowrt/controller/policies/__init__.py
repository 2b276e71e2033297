"""Replaceable decisions of the controller: admission, batching, dispatch, weight sync, rank balancing, group filter,
curriculum, guards.

- Each is a protocol with frozen dataclasses that implement it; a policy is passed as a value.
- Each policy has an identity setting that equals the default.
- A policy only chooses: it sends no message, changes no table, and reads no clock and no random numbers.
- Only a guard can stop a run: admission overrides weight sync, and every dispatch policy bounds overtaking.
"""
