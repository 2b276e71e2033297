"""The reference worker's script, for torchrun, srun and python; see `flowrt.roles.reference`."""

from flowrt.roles.reference import start

if __name__ == "__main__":
    start()
