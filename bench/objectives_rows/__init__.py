"""Measurements of the goals of the algorithms: one module for each, with a function ``measure``."""
