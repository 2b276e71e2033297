"""The source worker's script, for torchrun, srun and python; see `flowrt.roles.source`."""

from flowrt.roles.source import start

if __name__ == "__main__":
    start()
