"""CUDA graphs that contain all-reduces: recording, replay, and the memory that both use."""
