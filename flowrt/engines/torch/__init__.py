"""Engines on plain PyTorch, with the whole model in each process.

- Rollout is continuous batching over a row cache, seeded per sample; with ``rows=1`` it is bit-reproducible.
- In-flight updates recompute keys and values with the new weights on a second copy of the model.
- Data-parallel training ranks accumulate at their own pace and communicate once a step.
"""
