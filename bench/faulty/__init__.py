"""Runs with misfortunes: processes that are killed, stopped or cut off at any moment."""
