"""Rules on what happens within a step: kernels, launches, threads, synchronisation."""
