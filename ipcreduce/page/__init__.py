"""The control page: memory in which the ranks see each other's calls, faults and ends. It needs no CUDA."""
