"""Templates of Triton model repositories for TensorRT-LLM, and their renderers.

`triton_repo.render` writes a model repository for tritonserver that corresponds to
`inflight_batcher_llm` of tensorrtllm_backend, for one of three releases of TensorRT-LLM.
`triton_repo.parameters` lists the parameters of these templates. `triton_repo.gpt_repository` and
`triton_repo.llmapi_repository` each write another type of model repository. On a host without
TensorRT-LLM, `triton_repo.cpu_executor` replaces TensorRT-LLM in all these model repositories.
"""
