"""All-reduce over CUDA IPC: the pure plan, the exchange, the workspace, the control page, the launches."""
