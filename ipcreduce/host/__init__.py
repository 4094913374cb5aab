"""All-reduce of host arrays: through shared memory, or over MPI."""
