"""The torchrun agent of one host, with the rendezvous that counts hosts: takes the arguments of torchrun."""

import sys

from torch.distributed.run import main

from flowrt.ranks import rendezvous

if __name__ == "__main__":
    rendezvous.register(60.0)
    main(sys.argv[1:])
