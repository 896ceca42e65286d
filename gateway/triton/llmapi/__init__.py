"""Protocol of TensorRT-LLM's llmapi repository: a prompt as text, answered by the text so far."""
