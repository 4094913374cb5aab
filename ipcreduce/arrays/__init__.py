"""The arrays that programs pass, of every library, as the arrays that kernels and NumPy can reduce."""
