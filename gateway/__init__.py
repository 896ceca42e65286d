"""OpenAI-compatible API gateway for Triton running TensorRT-LLM."""
