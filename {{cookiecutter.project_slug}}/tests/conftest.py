"""What all tests share."""

from __future__ import annotations

from hypothesis import settings

pytest_plugins = ["wellfed.testing"]

# The same verdict every time, on a busy machine too.
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")
