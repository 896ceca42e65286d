"""Requests and responses of the model in TensorRT-LLM's llmapi repository.

A request has the prompt as text. Each streamed response repeats the complete text of the answer so
far.
"""
