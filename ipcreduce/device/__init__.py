"""What every backend on GPUs needs: the order of calls over streams, the fast path, memory that is freed later."""
