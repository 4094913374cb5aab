"""The backend "nccl": NVIDIA's NCCL, for ranks on several hosts and GPUs without peer access."""
