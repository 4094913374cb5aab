"""The CUDA sources, installed as ipcreduce.kernels so that the compiler finds them as package data."""
