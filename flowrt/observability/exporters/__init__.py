"""Exporters: a run's metrics, events, spans and samples in the formats of other tools.

- Each exporter reads the run directory in a process of its own; its failure costs the run no sample and no step.
- A number has the same name and value in every format, apart from single precision in TensorBoard and the characters
  of names in Prometheus; see `exported_names`.
"""
