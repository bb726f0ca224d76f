"""Runs the trials of a sweep: processes forked from one that has made what trials share, and the pool they run in.

Knows what a trial is; what is made of its results (grid, ledger, ranks) is the room ``sweep``.
Start from ``sweep.run_sweep`` and ``trial_pool``.
"""
