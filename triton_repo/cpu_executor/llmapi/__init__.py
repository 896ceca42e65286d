"""The classes of TensorRT-LLM's LLM API, implemented with the CPU executor.

The model in ``triton_repo/llmapi`` imports these classes if TensorRT-LLM is not installed.
``cpu_executor.install`` provides them under the names of the ``tensorrt_llm`` package. Names,
keywords and the order of arguments are the same as in releases 1.0 to 1.3. An unsupported argument
raises an error that names it.
"""
