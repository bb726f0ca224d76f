"""Wraps pynvml, which nothing else imports: NVML's session, its errors, and which card CUDA calls device 0.

It imports neither torch nor the configuration; a caller that has torch passes torch's UUIDs in.
A machine without a driver is normal: opening raises ``NvmlAbsentError``, and the caller goes on without NVML.

Start from ``session.NvmlSession`` and ``devices.list_devices``; ``visible.visible_devices`` maps to CUDA's numbering,
``readings`` and ``gpm`` give the figures of a device that change.
"""
