"""cgprof: capture and profile CUDA graphs for LLM inference."""

__version__ = "0.1.0"
