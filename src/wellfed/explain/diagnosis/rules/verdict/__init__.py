"""Rules on a run as a whole: healthy, unknown, too short, disturbed by other programs."""
