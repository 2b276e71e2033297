"""Transport of messages between controller and workers: ZeroMQ sockets, CURVE keys, liveness, connection limits.

- Only this package imports zmq.
- With keys set, a peer with an unknown key cannot connect.
- The memory that one peer can occupy is bounded, before and after its handshake.
"""
