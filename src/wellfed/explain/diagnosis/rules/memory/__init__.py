"""Rules on device and host memory: full, growing, unused."""
