"""Runs with one planted cause of waiting each, in real processes around simulated engines."""
