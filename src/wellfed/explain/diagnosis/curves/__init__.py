"""Curves of GPU utilisation: their level, their swings, and how both are worded."""
