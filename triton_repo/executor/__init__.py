"""The CPU executor: the Python API of the TensorRT-LLM executor over numpy."""
