"""A gateway for two scripted engines: the first fails, and the other resumes the answer."""

from __future__ import annotations

import asyncio
import json
from array import array
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import yaml
from tritonclient.grpc import service_pb2 as pb

from gateway.scheduling.replica import Replica
from tests.support.fake_triton import FakeTriton, Fault, serving
from tests.support.in_process import ids_of, metric_of, running, save_tokenizer

TEXT = "héllo"
PROMPT = "xyz"
CONTINUED = "gateway_generations_continued_total"
GREEDY = {"temperature": 0}


class Pair:
    """Two engines. `first` gets all requests; `other` has weight 0 and gets the resumed ones."""

    def __init__(
        self, folder: Path, ids: list[int], engines: list[FakeTriton], endpoints: list[str]
    ) -> None:
        self.ids = ids
        self.first, self.other = engines
        self.endpoints = endpoints
        self.config = folder / "c.yaml"
        self.client: httpx.AsyncClient
        self.service: Any = None

    def configure(self, *indexes: int, drain: bool = False) -> None:
        """Configure the replicas with these indexes, or both. `drain` applies to the first."""
        entries = [
            {"endpoint": self.endpoints[0], "drain": drain},
            {"endpoint": self.endpoints[1], "weight": 0},
        ]
        found = [entries[index] for index in indexes or (0, 1)]
        self.config.write_text(yaml.safe_dump({"anonymous": True, "replicas": found}))
        if self.service is not None:
            self.service.configuration.reload_now()

    def replica(self, index: int) -> Replica:
        """Return the current replica object for this endpoint."""
        found = [r for r in self.service.replicas if r.endpoint == self.endpoints[index]]
        replica: Replica = found[-1]
        return replica

    async def until_ready(self, *indexes: int) -> None:
        names = [self.endpoints[index] for index in indexes or (0, 1)]
        async with asyncio.timeout(300):
            while not all(
                metric_of(self.service, "gateway_replica_ready", replica=name) for name in names
            ):
                await asyncio.sleep(0.01)

    async def breaks(self, fault: Fault, step: int) -> None:
        """Make the first engine's next answer fail at token `step`. The other sends the rest."""
        self.first.fault, self.first.step = fault, step
        self.other.tokens = self.ids[step:]
        self.other.requests.clear()

    async def ask(self, **more: Any) -> httpx.Response:
        body = {"model": "m", "prompt": PROMPT, "max_tokens": 40} | more
        return await self.client.post("/v1/completions", json=body)


@asynccontextmanager
async def pair(folder: Path, text: str = TEXT, **settings: Any) -> AsyncIterator[Pair]:
    """Run both engines and the gateway. Each engine answers `text`, one token per byte."""
    save_tokenizer(folder)
    ids = ids_of(folder, text)
    engines = [FakeTriton(tokens=ids, fault=None, step=0) for _ in range(2)]
    async with serving(engines[0]) as one, serving(engines[1]) as two:
        made = Pair(folder, ids, engines, [one, two])
        made.configure()
        settings |= {"config": made.config, "allow_anonymous": True}
        async with running(folder, one, **settings) as (client, service, _):
            made.client, made.service = client, service
            await made.until_ready()
            yield made


def numbers(request: pb.ModelInferRequest, name: str, code: str = "i") -> list[int]:
    """Return the numbers that an engine received in a tensor."""
    names = [tensor.name for tensor in request.inputs]
    return array(code, request.raw_input_contents[names.index(name)]).tolist()


def events(answer: httpx.Response) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


def read_choice(answer: httpx.Response, *, stream: bool, tokens: int = len(TEXT.encode())) -> Any:
    """Return the choice. The deltas of a stream are joined, after checking its one end."""
    assert answer.status_code == 200, answer.text
    if stream:
        *frames, last = events(answer)
        usage = last["usage"]
        choices = [frame["choices"][0] for frame in frames]
        assert [c["finish_reason"] for c in choices[:-1]] == [None] * (len(choices) - 1)
        choice = choices[-1] | {"text": "".join([choice["text"] for choice in choices])}
    else:
        found = answer.json()
        usage, choice = found["usage"], found["choices"][0]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (len(PROMPT), tokens)
    return choice


def stream_fields(stream: bool) -> dict[str, Any]:
    """Return the request fields for a streamed or complete answer with usage."""
    return {"stream": stream} | ({"stream_options": {"include_usage": True}} if stream else {})
