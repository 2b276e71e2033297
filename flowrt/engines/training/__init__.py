"""Parts of both training engines (torch, fsdp): forward passes, loss, optimisations, adapters, state on disk.

- A pass returns the sum of its token losses; only the step divides, by the token count of all ranks.
- Optimisations (shared prefixes, compilation) change log-probabilities by no more than the model's numerical noise.
- State on disk is tensors in safetensors files, never pickles.
"""
