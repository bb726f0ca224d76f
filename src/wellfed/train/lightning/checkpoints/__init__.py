"""Checkpoints: when they are written, what is in a file, and how a run goes on from one."""
