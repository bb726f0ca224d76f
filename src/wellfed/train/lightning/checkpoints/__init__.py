"""Writes checkpoints and resumes from them. Start from `checkpoints.Checkpoints`, which decides when to save.

`checkpoint_files` checks a file. `resume_position` restores generators, the loader's
position and Lightning's counters.
"""
