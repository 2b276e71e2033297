"""Rollout and training engines behind the protocols of `base`: torch, fsdp, sglang, simulated.

- Engines depend on no session and no controller: roles call them, so an engine can be replaced or tested alone.
- A sample's seed fixes its random numbers, independent of the worker and of the sequences generated together with it.
- The gradient of a step does not depend on how its samples are split over passes, micro-batches or ranks.
- `options` imports no torch: recipes contain engine options.
"""
