"""The rows of `bench/objectives.py`: what proves the RL objectives, one module each."""
