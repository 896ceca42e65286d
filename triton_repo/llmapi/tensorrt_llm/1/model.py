"""The model of the llmapi repository, which generates text with TensorRT-LLM's LLM API.

Each response has the complete text so far. Where TensorRT-LLM is not installed,
`triton_repo.cpu_executor.llmapi` provides the same classes on the CPU. `triton_config.behaves_as`
in model.yaml names a release of upstream's model, whose behaviour this model imitates.

One thread with an event loop does all the work: it sends requests to the engine, sends responses,
and polls for disconnected clients. `execute` only passes requests to this thread. Triton 2.51
crashes if `is_cancelled` of a response sender is called while the final response is sent, or
afterwards. A single thread prevents both.

See decision 049 in docs/decisions.
"""

import asyncio
import json
import threading
from dataclasses import dataclass
from functools import partial
from typing import Any

import llm_api
import triton_python_backend_utils as pb_utils
from question import RequestInputs, read_question
from response import build_cancelled, build_empty, build_error, build_response
from settings import read_settings

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL


@dataclass(eq=False)
class ClientAnswer:
    """The responses to one Triton request.

    `sender` is Triton's response sender. `ended` is True if no more responses may be sent.
    """

    sender: Any
    generation: Any = None
    """The `RequestOutput` of the LLM API; None before the request was passed to the engine."""
    ended: bool = False

    def send(self, reply: Any, *, final: bool) -> None:
        """Send a response. After the final response, further calls have no effect."""
        if self.ended:
            return
        self.ended = final
        try:
            self.sender.send(reply, FINAL if final else 0)
        # Log the error and continue: Triton may have closed the sender, and the loop serves other
        # requests, too.
        except Exception as error:
            pb_utils.Logger.log_error(f"A response could not be sent: {error}")


class TritonPythonModel:
    @staticmethod
    def auto_complete_config(config: Any) -> Any:
        settings = read_settings()
        config.set_max_batch_size(settings.max_batch_size)
        config.set_model_transaction_policy({"decoupled": settings.decoupled})
        return config

    def initialize(self, args: dict[str, str]) -> None:
        config = json.loads(args["model_config"])
        if (count := config["instance_group"][0]["count"]) != 1:
            raise pb_utils.TritonModelException(f"instance_group.count: found {count}; allowed: 1")
        settings = read_settings()
        # Ask Triton whether the model is decoupled. The setting in model.yaml has no effect if
        # Triton did not call `auto_complete_config`.
        self._decoupled = pb_utils.using_decoupled_model_transaction_policy(config)
        self._behaviour = settings.behaviour
        self._period = settings.cancellation_check_period
        self._llm = llm_api.start(settings.llm)
        self._running: set[ClientAnswer] = set()
        self._by_id: dict[str, ClientAnswer] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="answers")
        self._thread.start()
        self._upstream_watch: Any = None
        if settings.polls_ended:
            self._upstream_watch = llm_api.upstream_watch(
                self._period,
                lambda answer: self._loop.call_soon_threadsafe(partial(self._cancel, answer)),
            )
            return
        self._watch = asyncio.run_coroutine_threadsafe(self._cancel_abandoned(), self._loop)

    def execute(self, requests: list[Any]) -> None:
        for request in requests:
            answer = ClientAnswer(request.get_response_sender())
            self._loop.call_soon_threadsafe(self._begin, request, answer)

    def finalize(self) -> None:
        if self._upstream_watch is None:
            self._watch.cancel()
        else:
            self._upstream_watch.stop()
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._llm.shutdown()

    def _begin(self, request: Any, answer: ClientAnswer) -> None:
        task = self._loop.create_task(self._serve(request, answer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _stop(self, request_id: str, stopping: ClientAnswer) -> None:
        if not request_id:
            why = "A request id must be provided for request cancellation"
            stopping.send(build_error(why), final=True)
            return
        if (answer := self._by_id.get(request_id)) is not None:
            self._cancel(answer, ends=self._behaviour.ends_stopped)
        stopping.send(build_cancelled(), final=True)

    def _cancel(self, answer: ClientAnswer, *, ends: bool = True) -> None:
        """Cancel a request in the engine, and send the final response at once.

        If `ends` is False, no final response is sent. Some upstream releases behave like this.
        """
        self._forget(answer)
        answer.generation.abort()
        if ends:
            answer.send(build_cancelled(), final=True)
        answer.ended = True

    def _forget(self, answer: ClientAnswer) -> None:
        self._running.discard(answer)
        if self._upstream_watch is not None:
            self._upstream_watch.remove(answer)

    async def _serve(self, request: Any, answer: ClientAnswer) -> None:
        """Run one request, and send its responses. If it fails, send an error response."""
        request_id = request.request_id()
        try:
            inputs = RequestInputs(request)
            if inputs.scalar("stop", default=False):
                self._stop(request_id, answer)
                return
            question = read_question(inputs)
            if question.streaming and not self._decoupled:
                raise ValueError("Streaming is only supported in decoupled mode.")
            streaming = question.streaming and self._behaviour.streams
            answer.generation = self._llm.generate_async(
                question.prompt,
                question.sampling,
                lora_request=question.lora,
                streaming=streaming,
            )
            self._running.add(answer)
            if self._upstream_watch is not None:
                self._upstream_watch.add(answer, request)
            # Store only the latest request with an id. Like upstream, assume that ids are unique.
            if request_id:
                self._by_id[request_id] = answer
            outputs = request.requested_output_names()
            empty_final = streaming and self._behaviour.empty_final
            async for output in answer.generation:
                if output.finished and not streaming:
                    self._forget(answer)
                if streaming or output.finished:
                    reply = build_response(output, question.outputs, outputs)
                    answer.send(reply, final=output.finished and not empty_final)
            answer.send(build_empty(), final=True)
        except Exception as failure:
            message = f"Error generating request: {failure}"
            pb_utils.Logger.log_error(message)
            if answer.generation is not None or self._behaviour.answers_early_errors:
                answer.send(build_error(message), final=True)
        finally:
            if answer.generation is not None:
                self._running.discard(answer)
                self._by_id.pop(request_id, None)

    async def _cancel_abandoned(self) -> None:
        while True:
            await asyncio.sleep(self._period)
            for answer in list(self._running):
                try:
                    if answer.sender.is_cancelled():
                        self._cancel(answer)
                # Log the error and continue: without this task, disconnected clients are not
                # detected.
                except Exception as failure:
                    pb_utils.Logger.log_error(f"A request could not be cancelled: {failure}")

    async def _end(self) -> None:
        for answer in list(self._running):
            answer.generation.abort()
        await asyncio.gather(*self._tasks)
