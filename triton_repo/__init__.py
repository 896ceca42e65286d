"""Templates of Triton model repositories for TensorRT-LLM, and their renderers.

`triton_repo.render` writes a model repository like `inflight_batcher_llm` of tensorrtllm_backend,
for one of three releases. tritonserver can load the repository. `triton_repo.parameters` lists the
parameters of the templates. `triton_repo.gpt_repository` and `triton_repo.llmapi_repository` write
two other model repositories. On a host without TensorRT-LLM, `triton_repo.cpu_executor` replaces
TensorRT-LLM in these model repositories.
"""
