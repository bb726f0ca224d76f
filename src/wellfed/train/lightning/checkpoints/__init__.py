"""Writes checkpoints and resumes from them. Start from `checkpoints.Checkpoints`, which decides when to save.

`checkpoint_writer`, `plain_checkpoint` and `checkpoint_files` check and write the file. `resume_position` restores
generators, the loader's position and Lightning's counters.
"""
