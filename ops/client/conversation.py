"""Sender of one request of `gateway client` to Triton.

`ask` sends the request, stops it after a delay if the options say so, and prints the responses.
"""

from __future__ import annotations

import asyncio
import time
import uuid

from gateway.tokenization.prompts import Prompts
from gateway.triton.client import TritonClient
from gateway.triton.direct import DirectModel, replies
from gateway.triton.transport import ConnectionOptions
from ops.client.answer import AnswerPrinter, PrintLine
from ops.client.question import Question
from ops.client.request import check, compose, prompt_ids


async def ask(url: str, options: ConnectionOptions, question: Question, say: PrintLine) -> bool:
    """Send the question and print the answer with `say`.

    Return True if the answer has no error and matches the expected ids, if any.

    Raises:
        OptionError: an option is wrong.
        GatewayError: Triton cannot be reached or refuses the request.
        TimeoutError: the answer takes longer than `question.timeout_s`.
    """
    client = TritonClient(url, options)
    try:
        model = await DirectModel.find(client, question.model)
        prompts = None
        if question.tokenizer_dir is not None:
            prompts = Prompts.load(question.tokenizer_dir)
        async with asyncio.timeout(question.timeout_s):
            return await _converse(client, model, question, prompts, say)
    finally:
        await client.close()


async def _converse(
    client: TritonClient,
    model: DirectModel,
    question: Question,
    prompts: Prompts | None,
    say: PrintLine,
) -> bool:
    check(model, question)
    request_id = question.request_id or uuid.uuid4().hex
    ids = prompt_ids(model, question, prompts)
    message = compose(model, question, prompts, ids, request_id)
    core = model
    if question.stop_after_ms and model.is_ensemble:
        # Send the stop request to `tensorrt_llm`, the ensemble's step that runs the engine: the
        # ensemble itself has no input `stop`. Triton gives both models the same request id.
        core = await DirectModel.find(client, "tensorrt_llm")
    answer = AnswerPrinter(question, prompts, ids, say, accumulates=model.llmapi)
    stream = await model.send(message)
    cancelled = False

    async def stop() -> None:
        nonlocal cancelled
        await asyncio.sleep(question.stop_after_ms / 1000)
        # With the llmapi repository, send the stop request and also cancel the RPC: TensorRT-LLM
        # 1.2 never ends the stream of a stopped request.
        cancelled = question.by_cancel or model.llmapi
        if not question.by_cancel:
            await _request_stop(core, request_id, answer, say)
        if cancelled:
            stream.cancel()

    stopper = asyncio.create_task(stop()) if question.stop_after_ms else None
    began, was_cancelled = time.monotonic(), False
    try:
        async for reply in replies(stream):
            if was_cancelled := cancelled and reply.cancelled:
                break
            answer.add_reply(reply, 1000 * (time.monotonic() - began))
    except asyncio.CancelledError:
        if not cancelled:
            raise
        was_cancelled = True
    if was_cancelled:
        say("Request is cancelled")
    elif not answer.failed:
        say("Got completed request")
    if stopper is not None:
        if cancelled or stopper.done():
            await stopper
        else:
            stopper.cancel()
    stream.cancel()
    answer.print_result()
    return not answer.failed and answer.report_match()


async def _request_stop(
    core: DirectModel, request_id: str, answer: AnswerPrinter, say: PrintLine
) -> None:
    async for reply in replies(await core.send(core.stop(request_id))):
        if reply.error and not reply.cancelled:
            answer.fail(reply.error)
        else:
            say("Got cancellation response from server")
