"""The rollout worker's script, for torchrun, srun and python; see `flowrt.roles.rollout`."""

from flowrt.roles.rollout import start

if __name__ == "__main__":
    start()
