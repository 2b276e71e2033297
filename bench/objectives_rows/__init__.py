"""The rows of `bench/objectives.py`: measurements that verify the RL objectives, one module each."""
