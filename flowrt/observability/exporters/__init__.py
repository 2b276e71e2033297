"""Exporters: a run's metrics, events, spans and samples in the formats of other tools.

- Each exporter reads the run directory, in a process of its own; its death costs no sample and no step.
- A number has the same value in every format.
"""
