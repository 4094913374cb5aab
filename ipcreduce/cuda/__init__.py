"""CUDA driver calls and kernel compilation, for the rest of ipcreduce."""
