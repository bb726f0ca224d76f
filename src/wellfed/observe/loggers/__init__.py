"""Writes what is known of a run: files always, wandb when chosen. A dead logger never kills a run; it is noted once.

Knows files, wandb and the record's keys; knows nothing of Lightning or of how training works.
Start from `journal.Journal` (all a run writes) and `sink.Sink` (who else wants the figures).
"""
