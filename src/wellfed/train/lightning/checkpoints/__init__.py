"""Writes checkpoints and resumes from them. Start from `checkpoints.Checkpoints`, which decides when to save.

`plain_checkpoint` and `checkpoint_files` write and check a file. `resume_position` restores generators, the loader's
position and Lightning's counters.
"""
