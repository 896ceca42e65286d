"""Requests to the llmapi repository's model.

Its inputs have no batch dimension: their shapes are [1], and [n] for texts.
"""

from __future__ import annotations

from gateway.errors import EngineUnavailable
from gateway.generation.engine_request import Generation, TextPrompt
from gateway.triton.model_capabilities import ModelCapabilities, StopModel
from gateway.triton.request import InferRequest, RequestBuilder
from gateway.triton.tensors import add_sampling


def generation_request(
    capabilities: ModelCapabilities,
    generation: Generation,
    text: TextPrompt,
    adapter: str | None = None,
) -> InferRequest:
    """Return the request for one generation.

    `adapter` is the path of the LoRA adapter's folder on the replica. The engine identifies an
    adapter by its id, and reads the folder only if no adapter with this id is in its memory.

    The answer is streamed only if the client wants a stream, because each streamed answer of
    NVIDIA's model may crash Triton. Stop strings are not sent, because the engine would compare
    token ids, and some releases fail on stop strings. The gateway searches the text for stop
    strings instead.

    Raise EngineUnavailable if this model does not support a parameter of the generation. Such
    parameters are normally refused earlier. They occur here only if the generation was prepared for
    another model: a model that Triton has replaced since, or the model of another replica.
    """
    if generation.beams or generation.params.guide or text.bad or text.bias:
        raise EngineUnavailable("The inference server has just changed; try again.")
    build = RequestBuilder(
        *(capabilities.model, capabilities.inputs, generation.request_id),
        names_outputs=capabilities.names_outputs,
        batched=False,
    )
    build.texts("prompt", [text.text])
    build.scalar("max_tokens", generation.max_tokens)
    build.scalar("exclude_prompt", True)
    if capabilities.decoupled:
        build.scalar("streaming", not capabilities.answers_once(text))
    if generation.params.lora is not None and adapter is not None:
        build.scalar("lora_id", generation.params.lora.task_id)
        build.texts("lora_name", [generation.params.lora.name])
        build.texts("lora_path", [adapter])
    build.scalar("seed", generation.seed)
    add_sampling(build, generation)
    for output in ("finish_reason", "stop_reason"):
        if build.has(output):
            build.scalar(output, True)
    if generation.params.usage and build.has("cache_stats"):
        build.scalar("cache_stats", True)
    return build.request


def stop_request(model: StopModel, request_id: str) -> InferRequest:
    """Return a stop request for the request with this id.

    The model answers the stop request with an error.
    """
    build = RequestBuilder(model.name, model.inputs, request_id, batched=False)
    build.texts("prompt", [""])
    build.scalar("stop", True)
    return build.request
