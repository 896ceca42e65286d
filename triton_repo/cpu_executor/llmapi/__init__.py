"""The classes of TensorRT-LLM's LLM API over the CPU executor: text in, accumulated text out.

`install` puts them in place under the names of the ``tensorrt_llm`` package; the model in
``triton_repo/llmapi`` imports them where there is no TensorRT-LLM. Names, keywords and their order
are those of the LLM API of releases 1.0 to 1.3; what the CPU executor lacks is refused by name.
"""
