"""Rows of bench/seeing.py."""
