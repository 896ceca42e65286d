"""The dialect of TensorRT-LLM's llmapi repository: text in, text so far out."""
