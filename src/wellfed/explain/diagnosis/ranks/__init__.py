"""Compares the ranks of a run, for the rules on them. Start from ``rank_comparison.py``."""
