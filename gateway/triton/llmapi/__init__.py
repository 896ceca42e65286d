"""The protocol of TensorRT-LLM's llmapi repository: text in, the text so far out."""
