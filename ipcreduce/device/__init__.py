"""The common part of all backends on GPUs: the order of calls over streams, the fast path, memory that is freed later."""
