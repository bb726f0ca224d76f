"""The record of a run: ``run.json``. Start from `entries`."""
