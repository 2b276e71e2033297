"""The trainer worker's script, for torchrun, srun and python; see `flowrt.roles.trainer`."""

from flowrt.roles.trainer import start

if __name__ == "__main__":
    start()
