"""Files of a run: the ledger, the restart log, and the metrics.

- The ledger has each prompt of each epoch in exactly one state, across any crash, resume or drop.
- A record is durable before any message that follows from it is sent.
- All tables of the ledger are in `schema`; a file of another schema version, or a damaged one, is refused unchanged.
- Everything in metrics.jsonl is also in the ledger, so the file can be rewritten from it.
- `integrity` and `ledger_reader` never change a file.
- `run_files` gives each command of the core to the files that keep it. No decision depends on what `time_files` and
  `recording_writer` write: where the time went, and the events themselves.
"""
