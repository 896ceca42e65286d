"""The CPU executor: the Python API of the TensorRT-LLM executor over numpy.

It stands in for TensorRT-LLM where that is not installed: in tests, in the demo and in development.
It is not for production, and `gateway serve` never imports it. `gateway up` imports it, and so does
the model `tensorrt_llm` in Triton on a host without TensorRT-LLM. It needs the extra `local`.

``bindings`` has the public names, those of ``tensorrt_llm.bindings.executor``; ``engine`` builds
and reads engine folders. A request goes through ``mailbox`` (queue) to ``loop`` (fetched, checked
by ``admission``, ``active`` until its final response), where ``scheduler`` assigns KV cache blocks
and tokens of an iteration, ``llama`` or ``gpt`` runs them (shared code is in ``causal_lm``), and
``decoder`` chooses the next tokens (``sampling``, ``beam``). ``synthetic`` is the other engine:
scripted tokens for load tests.

See decision 048 in docs/decisions.
"""
