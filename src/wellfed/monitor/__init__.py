"""Watches GPUs and host outside of a run of wellfed: for the monitor, and for users' own training loops.

Uses telemetry, NVML and the verdict on curves; no plans, configurations or Lightning (except `gpu_curves`). Start from
`monitor.Monitor`; for a loop of your own: ``from wellfed import GPUWatch``.

    the monitor       monitor: seen_gpus, processes -> board -> screens; curve_file
    loops of users    gpu_watch, gpu_curves -> loop_watch -> loop_summary; error_guard
"""
