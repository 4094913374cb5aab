"""All-reduce of host arrays over MPI."""
