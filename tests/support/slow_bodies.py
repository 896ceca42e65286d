"""A search for request bodies below 64 KiB that block a gateway's event loop for long.

`python -m tests.support.slow_bodies --seconds 600` searches longer than the tests do, with a new
seed each time.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import orjson

from tests.support.generated_bodies import PARAMETERS
from tests.support.loop_gateway import (
    SMALL_BODIES,
    LoopGateway,
    LoopTurn,
    SentRequest,
    loop_gateway,
)

MAX_BODY_BYTES = 64 * 1024
_SURVIVORS = 8
_OFTEN = [path for path, fields in PARAMETERS.items() for _ in fields]
_LARGE = ("tools",)
"""The most expensive parameters. Half of the bodies have them."""
_BESIDE_TOOLS = ("tool_choice", "response_format", "output_format", "text")
"""Parameters that cost more in combination with tools."""


class _Recipe(NamedTuple):
    """The random choices from which a body is generated."""

    path: str
    names: tuple[str, ...]
    size: int
    seed: int

    @property
    def kind(self) -> tuple[str, frozenset[str]]:
        """The endpoint and the set of parameters."""
        return self.path, frozenset(self.names)

    def make(self) -> SentRequest:
        """Return a request with a body of less than MAX_BODY_BYTES."""
        size = self.size
        while True:
            draw = random.Random(self.seed)
            body = dict(SMALL_BODIES[self.path])
            largest = draw.choice([*self.names, *(set(_LARGE) & {*self.names})])
            for name in self.names:
                share = size if name == largest else size // 16
                value = PARAMETERS[self.path][name](draw, share)
                body |= value if name == "" else {name: value}
            size = size * 3 // 4
            try:
                data = orjson.dumps(body)
            except orjson.JSONEncodeError:
                continue  # the body is nested too deeply
            if len(data) < MAX_BODY_BYTES:
                return SentRequest(self.path, data)


def _draw_recipe(draw: random.Random) -> _Recipe:
    path = draw.choice(_OFTEN)
    names = [*PARAMETERS[path]]
    chosen = draw.sample(names, min(draw.choice((1, 1, 2)), len(names)))
    if draw.random() < 0.5:
        chosen += [name for name in _LARGE if name in names]
    if "tools" in chosen and draw.random() < 0.8:
        chosen.append(draw.choice([name for name in _BESIDE_TOOLS if name in names] or chosen))
    size = MAX_BODY_BYTES // draw.choice((1, 1, 2, 4, 8))
    return _Recipe(path, tuple(dict.fromkeys(chosen)), size, draw.randrange(2**32))


def _mutate(draw: random.Random, recipe: _Recipe) -> _Recipe:
    match draw.randrange(3):
        case 0:
            return recipe._replace(seed=draw.randrange(2**32))
        case 1:
            return recipe._replace(size=int(recipe.size * draw.uniform(0.6, 1.3)))
        case _:
            more = draw.choice([*PARAMETERS[recipe.path]])
            return recipe._replace(names=tuple(dict.fromkeys((*recipe.names, more)))[-4:])


async def find_slowest(
    gateway: LoopGateway, bodies: int, seed: int = 0
) -> list[tuple[SentRequest, LoopTurn]]:
    """Return the requests with the longest loop iterations among `bodies` generated ones.

    Only the slowest of each combination of parameters survives and is mutated, so that the first
    slow request does not displace all others.
    """
    draw = random.Random(seed)
    found: dict[tuple[str, frozenset[str]], tuple[_Recipe, LoopTurn]] = {}
    for _ in range(bodies):
        if len(found) < _SURVIVORS or draw.random() < 0.6:
            recipe = _draw_recipe(draw)
        else:
            recipe = _mutate(draw, draw.choice(_slowest(found.values()))[0])
        turn = await gateway.longest_turn(recipe.make())
        known = found.get(recipe.kind)
        if known is None or known[1].seconds < turn.seconds:
            found[recipe.kind] = recipe, turn
    return [(recipe.make(), turn) for recipe, turn in _slowest(found.values())]


def _slowest(found: Iterable[tuple[_Recipe, LoopTurn]]) -> list[tuple[_Recipe, LoopTurn]]:
    return sorted(found, key=lambda each: -each[1].seconds)[:_SURVIVORS]


async def _search(seconds: float, seed: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        async with loop_gateway(Path(folder)) as gateway:
            ends = time.monotonic() + seconds
            while time.monotonic() < ends:
                for asked, _ in await find_slowest(gateway, 200, seed):
                    turn = await gateway.shortest(asked, 3, 0.0)
                    print(f"{turn.seconds * 1e3:.1f} ms: {asked}", flush=True)
                seed += 1
                print(flush=True)


def _main() -> None:
    parser = argparse.ArgumentParser(description="Search for bodies that hold up the event loop.")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    given = parser.parse_args()
    asyncio.run(_search(given.seconds, given.seed))


if __name__ == "__main__":
    _main()
