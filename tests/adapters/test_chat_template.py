"""Chat templates in adapters' folders, as transformers saves them and malformed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from adapters.chat_template import MAX_CHARACTERS, ChatTemplate, read
from adapters.errors import AdapterError, CorruptFile, PathEscape, TooLarge

RAG = {"name": "rag", "template": "r"}


def _write(folder: Path, config: Any, file: str | None = None) -> Path:
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    if file is not None:
        (folder / "chat_template.jinja").write_text(file)
    return folder


@pytest.mark.parametrize(
    ("config", "file", "expected"),
    [
        ({"chat_template": "a"}, None, ChatTemplate("a")),
        ({"chat_template": "a\n", "eos_token": "</s>"}, None, ChatTemplate("a", "</s>")),
        ({"eos_token": {"content": "</s>"}}, "b\n", ChatTemplate("b", "</s>")),
        # transformers prefers the newer chat_template.jinja to the configuration's field.
        ({"chat_template": "a"}, "b", ChatTemplate("b")),
        ({"chat_template": [RAG, {"name": "default", "template": "d"}]}, None, ChatTemplate("d")),
        (
            {"chat_template": ["x", RAG, {"name": "default", "template": "d"}]},
            None,
            ChatTemplate("d"),
        ),
        ({"chat_template": [RAG]}, None, None),
        ({"eos_token": "</s>"}, None, None),
    ],
)
def test_where_a_template_is(
    tmp_path: Path, config: Any, file: str | None, expected: ChatTemplate | None
) -> None:
    found = read(_write(tmp_path, config, file))
    assert (found and found.template) == expected


def test_byte_order_marks_are_no_part_of_it(tmp_path: Path) -> None:
    _write(tmp_path, {"eos_token": "</s>"}, "a")
    for path in tmp_path.iterdir():
        path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    found = read(tmp_path)
    assert (found and found.template) == ChatTemplate("a", "</s>")


def test_no_files_are_no_template(tmp_path: Path) -> None:
    assert read(tmp_path) is None


def test_the_tokens_that_its_tokenizer_added(tmp_path: Path) -> None:
    added = {"7": {"content": "<a>", "special": True}, "8": {"content": "<b>"}}
    found = read(_write(tmp_path, {"chat_template": "a", "added_tokens_decoder": added}))
    assert found is not None
    assert found.added_tokens == ((7, "<a>"), (8, "<b>"))


@pytest.mark.parametrize(
    ("config", "error"),
    [
        ([], CorruptFile),
        ({"chat_template": 1}, CorruptFile),
        ({"chat_template": [{"name": "default", "template": {}}]}, CorruptFile),
        ({"chat_template": "a", "eos_token": 1}, CorruptFile),
        ({"chat_template": "a", "eos_token": {}}, CorruptFile),
        ({"chat_template": "a", "added_tokens_decoder": [1]}, CorruptFile),
        ({"chat_template": "a", "added_tokens_decoder": {"x": {"content": "a"}}}, CorruptFile),
        ({"chat_template": "a", "added_tokens_decoder": {"1": {"content": 1}}}, CorruptFile),
        ({"chat_template": "a" * (MAX_CHARACTERS + 1)}, TooLarge),
        ({"x": "a" * 2**22}, TooLarge),
    ],
)
def test_what_is_none(tmp_path: Path, config: Any, error: type[AdapterError]) -> None:
    with pytest.raises(error):
        read(_write(tmp_path, config))


def test_half_a_file_and_one_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_bytes(b'{"chat_template": "\xff"}')
    with pytest.raises(CorruptFile):
        read(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("[" * 100_000)
    with pytest.raises(CorruptFile):
        read(tmp_path)
    folder = tmp_path / "adapter"
    folder.mkdir()
    (tmp_path / "secret").write_text("a")
    (folder / "chat_template.jinja").symlink_to(tmp_path / "secret")
    with pytest.raises(PathEscape):
        read(folder, within=folder)


def test_whatever_a_version_is_told_is_in_its_digest() -> None:
    digests = {
        template.digest(weights)
        for weights in ("w", "v")
        for template in (ChatTemplate("a"), ChatTemplate("b"), ChatTemplate("a", "</s>"))
    }
    assert len(digests) == 6
