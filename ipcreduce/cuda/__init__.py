"""The CUDA driver and the compiler, as the rest of ipcreduce sees them."""
