"""The classes of TensorRT-LLM's LLM API over the CPU executor: text in, accumulated text out.

`install` provides them under the names of the ``tensorrt_llm`` package; the model in
``triton_repo/llmapi`` imports them if TensorRT-LLM is not installed. Names, keywords and their
order are those of the LLM API of releases 1.0 to 1.3; unsupported arguments are refused by name.
"""
