"""The vllm rollout engine: generation on a server with its own Python environment."""

KEY_VARIABLE = "VLLM_API_KEY"
"""Environment variable of the worker: the API key of a server that it did not start."""
