"""The CPU executor: the Python API of the TensorRT-LLM executor over numpy.

The CPU executor replaces TensorRT-LLM on hosts without TensorRT-LLM: in tests, in the demo and in
development. It is not for production, and `gateway serve` never imports it. `gateway up` imports
it, and so does the model `tensorrt_llm` in Triton on a host without TensorRT-LLM. The package needs
the extra `local`.

``bindings`` has the public names, which are the names of ``tensorrt_llm.bindings.executor``.
``engine`` builds and reads engine folders. Stages of a request:

1. ``mailbox`` queues the request.
2. ``loop`` fetches it, and ``admission`` checks it. The request is ``active`` until its final
   response.
3. ``scheduler`` assigns KV cache blocks, and chooses the tokens of each iteration.
4. ``llama`` or ``gpt`` computes the logits; their shared code is in ``causal_lm``.
5. ``decoder`` chooses the next tokens, with ``sampling`` or ``beam``.

``synthetic`` is an engine without a model, which returns scripted tokens for load tests.

See decision 048 in docs/decisions.
"""
