"""The ranks of one host among themselves: calls, faults, the control page. It imports neither CUDA nor CuPy."""
