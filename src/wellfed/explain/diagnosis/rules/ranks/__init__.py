"""Rules on the ranks of a run: which one the others wait for, and why. `rank_comparison` finds it."""
