"""The common part of the backends on GPUs: order of calls over streams, fast path, memory that is freed later."""
