"""CUDA graphs: which to capture, how to record and replay them, and which one a step uses."""
