"""The reward worker's script, for torchrun, srun and python; see `flowrt.roles.reward`."""

from flowrt.roles.reward import start

if __name__ == "__main__":
    start()
