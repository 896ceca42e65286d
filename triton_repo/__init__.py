"""Templates of the `inflight_batcher_llm` model repository, for three releases.

`triton_repo.render` writes a repository that tritonserver can load. `triton_repo.parameters` lists
the template parameters. `triton_repo.cpu_executor` replaces TensorRT-LLM's executor on hosts
without TensorRT-LLM: `tensorrt_llm/1/model.py` then uses it.
"""
