"""A call's life: its number, its faults, and what follows them. It needs no CUDA."""
