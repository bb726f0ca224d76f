"""Writes checkpoints and resumes from them. Start from `checkpoints.Checkpoints`.

`late_checkpoints` waits for validations and the user's callbacks, `plain_checkpoint` and `checkpoint_trailer` write the
file, `resume_position` restores generators, the loader's position and Lightning's counters.
"""
