"""Tensors between workers: lanes, the sample store, versions of the weights.

- Tensors never pass through the controller.
- Bytes are moved, never converted.
"""
