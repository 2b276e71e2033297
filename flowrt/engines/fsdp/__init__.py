"""Training on FSDP2, with parameters, gradients and optimiser state sharded over the ranks.

- Ranks may have different numbers of micro-batches in a step.
- Checkpoints are readable on any number of ranks, and by the torch engine's names.
- Rank 0 alone reads the initial model and exports the final one.
"""
