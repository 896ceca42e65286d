"""Reading of an adapter's files from a multipart form sent to /v1/adapters."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from fastapi import Request
from starlette.datastructures import FormData, UploadFile
from starlette.requests import ClientDisconnect
from starlette.types import Message

from adapters import chat_template, npy_files, peft, tokenizer_config
from adapters.errors import store_errors
from gateway.api.body import get_media_type, refuse_encoding
from gateway.api.routing import Schema
from gateway.errors import ClientDisconnected, InvalidRequest
from gateway.http.http_errors import ContentTooLarge, UnsupportedMediaType

_MAX_FIELDS = 8
_FORM_OVERHEAD = 1024 * 1024
_TEMPORARY = "the folder for temporary files"

UPLOAD: Schema = {
    "type": "object",
    "required": ["name", "base", "file"],
    "properties": {
        "name": {"type": "string", "minLength": 1},
        "base": {"type": "string", "minLength": 1, "description": "The base model's name."},
        "file": {
            "type": "array",
            "minItems": 1,
            "items": {"type": "string", "contentMediaType": "application/octet-stream"},
            "description": "The adapter's files under their own names: adapter_config.json and "
            "adapter_model.safetensors, or model.lora_config.npy and model.lora_weights.npy; "
            "tokenizer_config.json and chat_template.jinja where it has its own chat template.",
        },
    },
}


async def read_upload(request: Request, max_bytes: int) -> FormData:
    """Return the multipart form of a request. Its files are stored as temporary files on arrival.

    Raises:
        ContentTooLarge: The files exceed `max_bytes`.
        StoreError: The temporary files cannot be written, for example on a full disk.
        UnsupportedMediaType: The body is not a form, or is compressed.
        ClientDisconnected: The client left during the upload.
    """
    received = 0

    async def receive_limited() -> Message:
        nonlocal received
        message = await request.receive()
        received += len(message.get("body", b""))
        if received > max_bytes + _FORM_OVERHEAD:
            raise ContentTooLarge("upload", max_bytes)
        return message

    if (given := get_media_type(request)) != "multipart/form-data":
        raise UnsupportedMediaType("content-type", given, "multipart/form-data, application/json")
    refuse_encoding(request)
    try:
        upload = Request(request.scope, receive_limited)
        with store_errors(_TEMPORARY):
            return await upload.form(max_files=_MAX_FIELDS, max_fields=_MAX_FIELDS)
    except ClientDisconnect:
        raise ClientDisconnected from None


def get_text_field(form: FormData, name: str) -> str:
    """Return a text field of the form. Raise InvalidRequest if the field is missing or empty."""
    value = form.get(name)
    if not isinstance(value, str) or not value:
        raise InvalidRequest(f"You must provide the form field {name}.", param=name)
    return value


def make_folder() -> Path:
    """Create a temporary folder for `save_files` and return its path.

    Blocks, so call this function in a thread. Raise StoreError if the folder cannot be created.
    """
    with store_errors(_TEMPORARY):
        return Path(tempfile.mkdtemp(prefix="adapter-"))


def save_files(form: FormData, folder: Path) -> None:
    """Copy the uploaded files of the form into `folder`.

    Blocks, so call this function in a thread. Raise InvalidRequest for a file name that adapters do
    not have. Raise StoreError if writing fails.
    """
    files = {peft.CONFIG, peft.WEIGHTS, peft.PICKLE, *npy_files.ALL}
    files |= {tokenizer_config.FILE, chat_template.FILE}
    for _, part in form.multi_items():
        if not isinstance(part, UploadFile):
            continue
        if part.filename not in files:
            allowed = ", ".join(sorted(files))
            raise InvalidRequest(f"file: found {part.filename!r}; allowed: {allowed}", param="file")
        with store_errors(_TEMPORARY), (folder / part.filename).open("wb") as file:
            shutil.copyfileobj(part.file, file)
