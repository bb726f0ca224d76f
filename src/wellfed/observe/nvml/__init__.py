"""Wraps pynvml, which nothing else imports: NVML's session, its errors, and CUDA's numbering of cards.

Imports neither torch nor the configuration; a caller that has torch passes in torch's UUIDs. A machine without a driver
is normal: opening raises an ``NvmlError`` that ``is_absent``, and the caller continues without NVML.

Start from ``session.NvmlSession`` and ``devices.list_devices``. ``visible.visible_devices`` maps to CUDA's numbering.
``readings`` and ``gpm`` read the changing figures of a device.
"""
