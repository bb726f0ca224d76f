"""Runs a configuration in turns against another commit (``wellfed bench``).

Start at `bench_rounds`, which runs and compares; `bench_sides` prepares the two sides.
"""
