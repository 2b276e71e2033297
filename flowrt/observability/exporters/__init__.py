"""Exporters: a run's metrics, events, spans and samples in the formats of other tools.

- Each exporter reads the run directory in a process of its own; its failure costs the run no sample and no step.
- A metric of metrics.jsonl has the same value in every format, apart from single precision in TensorBoard. The time of
  a role by kind is in seconds in W&B and Prometheus, and a share in TensorBoard.
"""
