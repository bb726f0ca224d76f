"""wellfed: plan a training run with reasons, watch it, and say where each millisecond went.

Nothing is imported here, so that ``wellfed.config`` answers before torch is loaded.
Start from ``wellfed.commands`` (what the commands do) and ``docs/architecture.md`` (which room knows what).
"""

__version__ = "0.1.0"
