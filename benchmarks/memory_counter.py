"""Counts live tensors. In a file of its own: its import takes as long as torch's."""

from __future__ import annotations

from typing import Any

from torch.distributed._tools.mem_tracker import MemTracker


class Counter(MemTracker):
    """torch's own count of live tensors. Which module they belong to isn't asked: its hooks fail on frozen parameters
    and on modules that are called twice.

    Under a mode such as this torch makes a few tensors that no run has, as under `memory_tracker`."""

    def _pre_fw_hook(self, *_: Any) -> None: ...

    def _post_fw_hook(self, *_: Any) -> None: ...

    def _pre_bw_hook(self, *_: Any) -> None: ...

    def _post_bw_hook(self, *_: Any) -> None: ...

    def peak_bytes(self) -> int:
        """Since it was last entered."""
        return max((snapshot["Total"] for snapshot in self.get_tracker_snapshot("peak").values()), default=0)
