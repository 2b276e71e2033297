"""What runs in the environment of a vLLM server: this directory is on its path. Imports nothing of flowrt."""
