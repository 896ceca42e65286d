"""Instructor, unmodified: each mode in which it requests a pydantic model."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import instructor
import openai
from checks import BASE_URL, CAPITAL, TOO_LONG, Person, refused, run
from instructor.core import InstructorRetryException

ASKED: dict[str, Any] = {"model": "demo", "temperature": 1, "seed": 3, "max_retries": 1}
MODES = (
    instructor.Mode.TOOLS,
    instructor.Mode.TOOLS_STRICT,
    instructor.Mode.JSON_SCHEMA,
)


def client(mode: instructor.Mode) -> instructor.Instructor:
    plain = openai.OpenAI(base_url=BASE_URL, api_key="none", max_retries=0)
    return instructor.from_openai(plain, mode=mode)


def _said(text: str) -> list[Any]:
    return [{"role": "user", "content": text}]


def models() -> None:
    for mode in MODES:
        person, answer = client(mode).create_with_completion(
            response_model=Person, messages=_said(CAPITAL), **ASKED
        )
        assert isinstance(person, Person), mode
        assert answer.usage.completion_tokens > 0


def partial_models() -> None:
    for mode in MODES:
        *parts, last = client(mode).create_partial(
            response_model=Person, messages=_said(CAPITAL), **ASKED
        )
        assert parts, mode
        assert Person.model_validate(last.model_dump()), mode


def several() -> None:
    found = client(instructor.Mode.TOOLS).create_iterable(
        response_model=Person, messages=_said(CAPITAL), max_tokens=400, **ASKED
    )
    assert isinstance(found, Iterable)
    assert isinstance(next(iter(found)), Person)


async def of_an_async_client() -> None:
    plain = openai.AsyncOpenAI(base_url=BASE_URL, api_key="none", max_retries=0)
    able = instructor.from_openai(plain, mode=instructor.Mode.TOOLS)
    person = await able.create(response_model=Person, messages=_said(CAPITAL), **ASKED)
    assert isinstance(person, Person)


def refusals() -> None:
    for model, prompt, word in (("nobody", CAPITAL, "nobody"), ("demo", TOO_LONG, "context")):
        with refused(InstructorRetryException, openai.APIStatusError) as errors:
            client(instructor.Mode.TOOLS).create(
                response_model=Person, messages=_said(prompt), **ASKED | {"model": model}
            )
        assert word in str(errors[0])


if __name__ == "__main__":
    run(models, partial_models, several, of_an_async_client, refusals)
