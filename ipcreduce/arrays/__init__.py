"""Arrays of every library, checked and turned into the arrays that the kernels and NumPy can reduce."""
