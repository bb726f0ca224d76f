"""Plans a training run with reasons, watches it, and says where each millisecond went.

Nothing is imported here, so that ``wellfed.config`` answers before torch is loaded.
Start from ``wellfed.commands`` (what the commands do) and ``docs/architecture.md`` (which room knows what).
"""

__version__ = "0.1.0"
