"""The CPU executor: the Python API of the TensorRT-LLM executor over numpy.

``bindings`` holds the public names, those of ``tensorrt_llm.bindings.executor``; ``engine`` makes
and reads engine folders. A request goes through ``mailbox`` (queue) to ``loop`` (fetched, checked
by ``admission``, ``active`` until its final response), where ``scheduler`` gives it KV cache
blocks and tokens of an iteration, ``llama`` runs them, and ``decoder`` chooses what comes next
(``sampling``, ``beam``). ``synthetic`` is the other engine, scripted tokens for load tests.
"""
