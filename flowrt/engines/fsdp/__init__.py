"""Training on FSDP2, with parameters, gradients and optimiser state sharded over the ranks.

- Ranks may have different numbers of micro-batches in a step.
- Checkpoints are readable on any number of ranks; their tensors have the names of the torch engine's checkpoints.
- Only rank 0 reads the initial model and exports the final one.
"""
