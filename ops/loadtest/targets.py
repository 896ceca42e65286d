"""Targets of a load test: a model in Triton, or the gateway.

All targets choose tokens greedily and ignore the end token, so the engine does the same work for a
request through any target. The model of the llmapi repository cannot ignore the end token. With
greedy choice, its answer to a prompt nevertheless has the same length through all targets.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from typing import Any, Protocol

import httpx
import orjson

from gateway.errors import GatewayError
from gateway.triton.direct import DirectModel, Reply, replies
from ops.errors import OptionError
from ops.loadtest.requests import BenchRequest
from ops.loadtest.sample import Mode, Sample

_NEVER = -1
_DATA = b"data: "


class RequestFailed(Exception):
    """The request has failed. The message is the server's error message, or the reason."""


class BenchTarget(Protocol):
    mode: Mode

    @property
    def what(self) -> str:
        """Description of the server and the format of the requests, for the report."""

    async def ask(self, request: BenchRequest, sample: Sample, now: Callable[[], float]) -> None:
        """Send a request, and record its token counts and times in `sample`.

        `now` returns the seconds since the start of the run. Raises RequestFailed.
        """


class TritonTarget:
    """A model in Triton, over gRPC.

    The model with the engine gets token ids. The ensemble gets text.
    """

    def __init__(self, mode: Mode, model: DirectModel, *, streaming: bool) -> None:
        self.mode = mode
        self._model = model
        self._streaming = streaming
        kind = "text" if model.takes_text else "token ids"
        self._what = f"{model.name} over gRPC, {kind}"

    @property
    def what(self) -> str:
        return self._what

    async def ask(self, request: BenchRequest, sample: Sample, now: Callable[[], float]) -> None:
        build = self._model.request(uuid.uuid4().hex)
        if self._model.takes_text:
            build.texts("prompt", [request.text])
            build.output("text_output")
        else:
            build.numbers("prompt", request.ids, len(request.ids))
            build.scalar("prompt_length", len(request.ids))
            build.output("output_ids")
            if "sequence_length" in self._model.outputs:
                build.output("sequence_length")
        build.scalar("max_tokens", request.output_tokens)
        build.scalar("top_k", 1)
        if build.has("end_id"):
            build.scalar("end_id", _NEVER)
        if build.needs("pad_id"):
            build.scalar("pad_id", 0)
        if build.has("exclude_prompt"):
            build.scalar("exclude_prompt", True)
        if self._streaming:
            build.scalar("streaming", True)
        sample.input_tokens = len(request.ids)
        try:
            stream = await self._model.send(build.request)
            try:
                async for reply in replies(stream):
                    if reply.error:
                        raise RequestFailed(reply.error)
                    self._count(reply, request, sample, now)
            finally:
                stream.cancel()
        except GatewayError as error:
            raise RequestFailed(error.message) from error

    def _count(
        self, reply: Reply, request: BenchRequest, sample: Sample, now: Callable[[], float]
    ) -> None:
        if not self._model.takes_text:
            ids = reply.ids()
            tokens = len(ids[0]) if ids else 0
            if not self._streaming and "exclude_prompt" not in self._model.inputs:
                tokens = max(0, tokens - len(request.ids))
        elif not reply.has("text_output"):
            tokens = 0
        else:
            # Responses with text do not state the number of tokens. Assume one token in a streamed
            # response, and the requested number in a non-streaming response: the end token is
            # ignored, so no answer is shorter.
            tokens = 1 if self._streaming else request.output_tokens
        sample.output_tokens += tokens
        if tokens and self._streaming:
            sample.record_token(now())


class GatewayTarget:
    """Target that sends requests to the gateway's chat or completions endpoint over HTTP.

    The prompt of a completion is token ids, or text if the gateway serves the llmapi repository.
    """

    mode: Mode = "chat"

    def __init__(
        self,
        http: httpx.AsyncClient,
        url: str,
        model: str,
        *,
        through_template: bool,
        streaming: bool,
    ) -> None:
        self._http = http
        self._model = model
        self._through_template = through_template
        self._streaming = streaming
        self._path = "/v1/chat/completions" if through_template else "/v1/completions"
        self._url = url + self._path
        # True if the gateway serves the llmapi repository, which takes text instead of token ids
        # and cannot ignore the end token. `ask` sets this when the gateway refuses `ignore_eos`.
        self._of_text = False

    @property
    def what(self) -> str:
        ids = "text" if self._of_text else "token ids"
        kind = "one user message" if self._through_template else ids
        return f"the gateway's {self._path} over HTTP, {kind}"

    async def ask(self, request: BenchRequest, sample: Sample, now: Callable[[], float]) -> None:
        body: dict[str, Any] = {
            "model": self._model,
            "max_tokens": request.output_tokens,
            "temperature": 0,
        }
        if not self._of_text:
            body["ignore_eos"] = True
        if self._through_template:
            body["messages"] = [{"role": "user", "content": request.text}]
        else:
            body["prompt"] = request.text if self._of_text else request.ids
        if self._streaming:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        headers = {"content-type": "application/json"}
        try:
            async with self._http.stream(
                "POST", self._url, content=orjson.dumps(body), headers=headers
            ) as response:
                if response.status_code != 200:
                    error = await response.aread()
                    if "ignore_eos" not in body or _parameter(error) != "ignore_eos":
                        raise RequestFailed(_message(error))
                    self._of_text = True
                elif self._streaming:
                    await self._read_stream(response, sample, now)
                else:
                    self._read_usage(orjson.loads(await response.aread()), sample)
            if response.status_code != 200:
                await self.ask(request, sample, now)
        except httpx.HTTPError as error:
            raise RequestFailed(f"{type(error).__name__}: {error}") from error
        except (ValueError, KeyError, TypeError) as error:
            raise RequestFailed(f"the answer is not OpenAI's: {error!r}") from error

    async def _read_stream(
        self, response: httpx.Response, sample: Sample, now: Callable[[], float]
    ) -> None:
        left, complete = b"", False
        async for data in response.aiter_bytes():
            *lines, left = (left + data).split(b"\n")
            for line in lines:
                if not line.startswith(_DATA + b"{"):
                    continue
                chunk = orjson.loads(line[len(_DATA) :])
                if "error" in chunk:
                    raise RequestFailed(_message(line[len(_DATA) :]))
                if chunk.get("usage"):
                    self._read_usage(chunk, sample)
                    complete = True
                elif _has_text(chunk):
                    sample.record_token(now())
        if not complete:
            raise RequestFailed("the stream ended before its usage")

    def _read_usage(self, answer: dict[str, Any], sample: Sample) -> None:
        sample.input_tokens = answer["usage"]["prompt_tokens"]
        sample.output_tokens = answer["usage"]["completion_tokens"]


def _has_text(chunk: dict[str, Any]) -> bool:
    for choice in chunk["choices"]:
        delta = choice.get("delta", {})
        if choice.get("text") or delta.get("content") or delta.get("reasoning_content"):
            return True
    return False


def _parameter(body: bytes) -> str | None:
    """Return `error.param` of an error response in OpenAI's format; None if it has none."""
    try:
        blamed = orjson.loads(body)["error"]["param"]
    except (ValueError, KeyError, TypeError):
        return None
    return None if blamed is None else str(blamed)


def _message(body: bytes) -> str:
    """Return `error.message` of an error response in OpenAI's format, else the body's start."""
    try:
        return str(orjson.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return body[:200].decode(errors="replace")


async def first_model(http: httpx.AsyncClient, url: str) -> str:
    """Return the first model in the gateway's list. Raises OptionError if the list is empty."""
    try:
        response = await http.get(f"{url}/v1/models")
        response.raise_for_status()
        name: str = response.json()["data"][0]["id"]
    except (httpx.HTTPError, ValueError, KeyError, IndexError) as error:
        raise OptionError(f"--gateway-url: {url} does not say its models: {error}") from error
    return name


def clock() -> Callable[[], float]:
    """Return a function that returns the seconds since this call."""
    began = time.perf_counter()
    return lambda: time.perf_counter() - began
