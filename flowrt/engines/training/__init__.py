"""What the torch and fsdp training engines share: forward passes, the loss, optimisations, adapters, state on disk.

- A pass returns the sum of its token losses; only the step divides, by the token count of all ranks.
- Optimisations (shared prefixes, compilation) leave log-probabilities as they are, within the model's own noise.
- State on disk is tensors in safetensors files, never pickles.
"""
