"""OpenAI-compatible API gateway for Triton running TensorRT-LLM."""

__version__ = "0.1.0"
