"""The `inflight_batcher_llm` model repository of three releases, as templates.

`triton_repo.render` fills the templates into a folder that tritonserver can load;
`triton_repo.parameters` lists what they take; `triton_repo.cpu_executor` is the CPU stand-in
for TensorRT-LLM's executor, which `tensorrt_llm/1/model.py` uses on hosts without one.
"""
