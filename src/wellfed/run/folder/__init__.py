"""Manages the folder of a run: creates and locks it, logs to it, reads its checkpoints, finds the run to resume.

Start with `run_folder` and `resume`.
"""
