"""The wire protocol: messages, the records in them, and their encoding.

- `messages` is the whole protocol. A message's tag is its position in `MESSAGES`, so new ones are appended.
- Received bytes are checked field by field; malformed bytes raise RemoteProtocolError. Nothing is unpickled.
- No message carries a tensor.
"""
