"""Versions of the weights: snapshot, checksum, delta, relay.

- A published version is a snapshot, never live parameters.
- Deltas are lossless; every received version is verified against its checksum.
"""
