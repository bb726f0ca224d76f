"""Opens the only door to pynvml: NVML's session, its errors, and which card CUDA calls device 0.

It must not know torch, the configuration or what the figures are for; a caller that has torch passes torch's UUIDs in.
A machine without a driver is normal here: opening raises ``NvmlAbsentError`` and whoever asked goes on without.

Start from ``session.NvmlSession`` and ``devices.list_devices``; ``visible.visible_devices`` maps to CUDA's numbering,
``readings`` and ``gpm`` give the figures of a device that change.
"""
