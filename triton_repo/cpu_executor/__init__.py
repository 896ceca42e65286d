"""The CPU executor: the Python API of the TensorRT-LLM executor over numpy.

It stands in for TensorRT-LLM where there is none: in tests, in the demo, at a developer's desk. It
serves nobody, and `gateway serve` never imports it: what does is `gateway up` and, in Triton, the
model `tensorrt_llm` on a host without TensorRT-LLM. What it needs is the extra `local`.

``bindings`` holds the public names, those of ``tensorrt_llm.bindings.executor``; ``engine`` makes
and reads engine folders. A request goes through ``mailbox`` (queue) to ``loop`` (fetched, checked
by ``admission``, ``active`` until its final response), where ``scheduler`` gives it KV cache
blocks and tokens of an iteration, ``llama`` or ``gpt`` runs them (what both share is in
``causal_lm``), and ``decoder`` chooses what comes next (``sampling``, ``beam``). ``synthetic`` is
the other engine, scripted tokens for load tests.
"""
