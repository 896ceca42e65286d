"""Adapters that the gateway fetches for an admin from HTTPS, S3, Hugging Face or a folder."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from gateway.config.tenants import key_hash, new_key
from gateway.observability.logs import configure_logging
from tests.support.adapter_store import becomes
from tests.support.authority import Authority
from tests.support.disk_engine import DiskEngine, save_model
from tests.support.fake_triton import serving
from tests.support.file_servers import Behaviour, FileServer, S3Server
from tests.support.full_disk import full_disk
from tests.support.in_process import running
from tests.support.lora_files import qv_tensors, write_peft

ADMIN, TENANT = new_key(), new_key()
WHO = key_hash(ADMIN)[:15]
MODEL = "demo"
LIMIT = 64 * 1024
WEIGHTS = "adapter_model.safetensors"


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    return write_peft(tmp_path / "adapter", qv_tensors(seed=1))


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FileServer]:
    """Yield an HTTPS file server whose certificate this process trusts."""
    authority = Authority(tmp_path, "files")
    monkeypatch.setenv("SSL_CERT_FILE", str(authority.file))
    with FileServer(authority.issue("server")) as server:
        yield server


@pytest.fixture
def debug_log(capfd: pytest.CaptureFixture[str]) -> Iterator[pytest.CaptureFixture[str]]:
    """Set the log level to debug, and yield the capture of what is logged."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    configure_logging("debug")
    yield capfd
    root.handlers[:], root.level = handlers, level


@contextlib.asynccontextmanager
async def _gateway(
    tmp_path: Path, *sources: str, **settings: Any
) -> AsyncIterator[tuple[httpx.AsyncClient, Any]]:
    (tmp_path / "model").mkdir()
    folder = save_model(tmp_path / "model")
    fields = {"admin_key": ADMIN, "adapter_sources": list(sources), "max_adapter_bytes": LIMIT}
    fields |= {"model_name": MODEL, **settings}
    async with serving(DiskEngine(tmp_path)) as endpoint:
        async with running(folder, endpoint, **fields) as (client, service, _):
            await asyncio.wait_for(service.started.wait(), 60)
            yield client, service
            # No temporary file remains, whether the fetch succeeded or failed.
            incoming = folder / "adapters" / "@incoming"
            await becomes(lambda: not incoming.exists() or not list(incoming.iterdir()))


async def _add(
    client: httpx.AsyncClient, source: str, key: str = ADMIN, **changed: str
) -> httpx.Response:
    wanted = {"name": "zh", "base": MODEL, "source": source, **changed}
    return await client.post(
        "/v1/adapters", json=wanted, headers={"authorization": f"Bearer {key}"}
    )


async def _upload(client: httpx.AsyncClient, name: str, folder: Path) -> httpx.Response:
    return await client.post(
        "/v1/adapters",
        data={"name": name, "base": MODEL},
        files=[("file", (path.name, path.read_bytes())) for path in folder.iterdir()],
        headers={"authorization": f"Bearer {ADMIN}"},
    )


def _error(answer: httpx.Response) -> tuple[int, str]:
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
    return answer.status_code, answer.json()["error"]["code"]


async def _records(client: httpx.AsyncClient) -> Any:
    answer = await client.get("/v1/adapters", headers={"authorization": f"Bearer {ADMIN}"})
    return answer.json()["data"]


async def test_without_the_extra_s3_is_refused_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "s3fs", None)  # simulates a missing package
    async with _gateway(tmp_path, "s3://bucket") as (client, _):
        answer = await _add(client, "s3://bucket/zh")
        assert _error(answer) == (400, "adapter_source_unsupported")
        assert "triton-openai-gateway[sources]" in answer.json()["error"]["message"]


async def test_a_folder_of_the_root_is_an_hf_source_without_revisions(
    tmp_path: Path, adapter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "none"))
    shutil.copytree(adapter, tmp_path / "root" / "acme" / "zh")
    async with _gateway(tmp_path, "hf://", adapter_root=tmp_path / "root") as (client, _):
        assert (await _add(client, "hf://acme/zh")).status_code == 201
        refused = await _add(client, "hf://acme/zh@main")
        assert _error(refused) == (400, "adapter_file_missing")


async def test_over_https_with_its_provenance_and_without_its_secrets(
    tmp_path: Path, server: FileServer, adapter: Path, debug_log: pytest.CaptureFixture[str]
) -> None:
    server.put("/lora/zh", adapter)
    server.put("/lora/cdn", adapter)
    signed = f"/lora/cdn/{WEIGHTS}?sig=hunter4"
    server.behaves[f"/lora/zh/{WEIGHTS}"] = _redirect(signed)
    place = f"https://127.0.0.1:{server.port}/lora"
    secret = f"https://me:hunter2@127.0.0.1:{server.port}/lora/zh?sig=hunter3"
    async with _gateway(tmp_path, place) as (client, service):
        answer = await _add(client, secret)
        assert answer.status_code == 201, answer.text
        [version] = answer.json()["versions"]
        assert (version["source"], version["added_by"]) == (f"{place}/zh", WHO)
        [kept] = service.adapters.records[0].versions
        local = await _upload(client, "same", adapter)
        [uploaded] = local.json()["versions"]
        assert (uploaded["source"], uploaded["added_by"]) == ("upload", WHO)
        assert uploaded["digest"] == version["digest"] == kept.digest
        failed = await _add(client, secret.replace("/zh", "/nothing"))
        assert _error(failed) == (400, "adapter_file_missing")
        told = f"{answer.text} {failed.text} {await _records(client)}"
    log = debug_log.readouterr().err
    assert " DEBUG " in log
    assert "hunter" not in told + log
    # The source's query string is sent for each file, and only the adapter's files are requested.
    of_cdn = [target for _, target in server.asked if target.startswith("/lora/cdn/")]
    assert set(of_cdn) == {signed}
    first = [target for _, target in server.asked if target not in of_cdn]
    assert {target.partition("?")[2] for target in first} == {"sig=hunter3"}
    assert set(server.authorization) == {"Basic bWU6aHVudGVyMg==", None}
    names = {target.partition("?")[0].rpartition("/")[2] for _, target in server.asked}
    assert names == {
        "adapter_config.json",
        WEIGHTS,
        "tokenizer_config.json",
        "chat_template.jinja",
    }


async def test_from_s3_with_the_environments_credentials(
    tmp_path: Path,
    adapter: Path,
    monkeypatch: pytest.MonkeyPatch,
    debug_log: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("AWS_SESSION_TOKEN", "hunter5")
    with S3Server() as s3:
        s3.put("/bucket/lora/zh", adapter)
        for name, value in s3.environment.items():
            monkeypatch.setenv(name, value)
        async with _gateway(tmp_path, "s3://bucket/lora") as (client, _):
            answer = await _add(client, "s3://bucket/lora/zh")
            assert answer.status_code == 201, answer.text
            assert answer.json()["versions"][0]["source"] == "s3://bucket/lora/zh"
            missing = await _add(client, "s3://bucket/lora/nothing")
            assert _error(missing) == (400, "adapter_file_missing")
            asked = len(s3.asked)
            other = await _add(client, "s3://bucket/lora-secret/zh")
            assert _error(other) == (403, "adapter_source_not_allowed")
            assert len(s3.asked) == asked
            s3.files[f"/bucket/lora/zh/{WEIGHTS}"] = bytes(LIMIT + 1)
            large = await _add(client, "s3://bucket/lora/zh")
            assert _error(large) == (413, "adapter_too_large")
            assert not any(method == "GET" and WEIGHTS in t for method, t in s3.asked[asked:])
            monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "another")
            wrong = await _add(client, "s3://bucket/lora/zh")
            assert _error(wrong) == (503, "adapter_source_unavailable")
    log = debug_log.readouterr().err
    assert " DEBUG " in log
    assert "hunter5" not in log


async def test_from_the_hugging_face_cache_by_branch_and_by_commit(
    tmp_path: Path, adapter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = "0123456789abcdef0123456789abcdef01234567"
    model = tmp_path / "hf" / "hub" / "models--acme--zh"
    (model / "refs" / "pr").mkdir(parents=True)
    (model / "refs" / "main").write_text(commit)
    (model / "blobs").mkdir()
    snapshot = model / "snapshots" / commit
    snapshot.mkdir(parents=True)
    for number, path in enumerate(adapter.iterdir()):
        shutil.copy(path, model / "blobs" / str(number))
        (snapshot / path.name).symlink_to(f"../../blobs/{number}")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    async with _gateway(tmp_path, "hf://acme") as (client, _):
        for source in ("hf://acme/zh", "hf://acme/zh@main", f"hf://acme/zh@{commit[:8]}"):
            answer = await _add(client, source, name=f"zh-{source[-4:].replace('/', '')}")
            assert answer.status_code == 201, answer.text
            assert answer.json()["versions"][0]["source"] == source
        for source in ("hf://acme/zh@other", "hf://acme/zh@0123", "hf://acme/none"):
            assert _error(await _add(client, source)) == (400, "adapter_file_missing"), source
        assert _error(await _add(client, "hf://evil/zh")) == (403, "adapter_source_not_allowed")
        # A snapshot's files may only link to files of the same model in the cache.
        (snapshot / WEIGHTS).unlink()
        (snapshot / WEIGHTS).symlink_to(adapter / WEIGHTS)
        assert _error(await _add(client, "hf://acme/zh")) == (400, "adapter_path_outside_root")


async def test_folders_below_what_is_allowed_alone(tmp_path: Path, adapter: Path) -> None:
    (tmp_path / "allowed").mkdir()
    shutil.copytree(adapter, tmp_path / "allowed" / "zh")
    (tmp_path / "allowed" / "link").symlink_to(adapter)
    named = {"adapters": {"boot": adapter}}
    async with _gateway(tmp_path, str(tmp_path / "allowed"), **named) as (client, service):
        [boot] = service.adapters.record("boot").versions
        assert (boot.source, boot.added_by) == (str(adapter), "GATEWAY_ADAPTERS")
        assert (await _add(client, str(tmp_path / "allowed" / "zh"))).status_code == 201
        (tmp_path / "allowed" / "circle").symlink_to("circle")
        allowed = tmp_path / "allowed"
        no_folders = (allowed / ("x" * 300), allowed / "circle", allowed / "circle" / "zh")
        for elsewhere in (adapter, allowed / "link", "/etc", "/nowhere", *no_folders):
            refused = await _add(client, str(elsewhere))
            assert _error(refused) == (403, "adapter_source_not_allowed"), refused.text
            assert "GATEWAY_ADAPTER_SOURCES" in refused.json()["error"]["message"]


NO_SOURCES = [
    *("", "zh", "../zh", "/a/../etc", "file:///etc", "http://127.0.0.1/zh", "ftp://a/b"),
    *("https://", "https://a b/zh", "https://a\\@b/zh", "https://a@b@c/zh", "https://a/b#c"),
    *("https://a/../b", "https://a/%2e%2e/b", "https://a/b%2fc", "https://a/%252e%252e/b"),
    *("https://a/..;/b", "https://a/%2e.;x=1/b", "https://a/;x/b", "https://a/%c0%ae%c0%ae/b"),
    *("https://a:port/b", "https://[::1/b", "s3://", "s3://bucket/a?b", "s3://me:pw@bucket/a"),
    *("hf://owner", "hf://owner/..", "hf://owner/name@", "hf://owner/name@../../x"),
    *(
        "memory://a/b",
        "zip://a::https://b/c",
        "https://a/" + "x" * 3000,
        "https://á/b",
        "s3://b/\n",
    ),
]


async def test_what_can_be_no_source_is_refused_by_name(tmp_path: Path) -> None:
    async with _gateway(tmp_path, "https://a", "hf://", "s3://bucket") as (client, _):
        for source in NO_SOURCES:
            answer = await _add(client, source)
            assert _error(answer) == (400, "adapter_source_invalid"), (source, answer.text)
            assert answer.json()["error"]["param"] == "source"
            assert "pw" not in answer.text


async def test_no_tenant_and_without_settings_no_admin_makes_it_fetch(
    tmp_path: Path, server: FileServer, adapter: Path
) -> None:
    server.put("/zh", adapter)
    source = f"https://127.0.0.1:{server.port}/zh"
    file = tmp_path / "gateway.yaml"
    tenants = [{"name": "t", "keys": [key_hash(TENANT)], "models": ["*"]}]
    file.write_text(yaml.safe_dump({"tenants": tenants}))
    async with _gateway(tmp_path, config=file) as (client, _):
        assert _error(await _add(client, source, TENANT)) == (401, "invalid_api_key")
        for named in (source, "s3://bucket/zh", "hf://a/b", str(adapter)):
            assert _error(await _add(client, named)) == (403, "adapter_source_not_allowed")
        chat = {"model": source, "prompt": "x"}
        headers = {"authorization": f"Bearer {TENANT}"}
        assert (await client.post("/v1/completions", json=chat, headers=headers)).status_code == 404
    assert server.asked == []


def _lies_short(handler: Any) -> None:
    """Announce 1000 bytes, send 100, and close the connection."""
    handler.answer(200, b"x" * 100, content_length="1000", connection="close")
    handler.close_connection = True


def _endless(handler: Any) -> None:
    handler.send_response(200)
    handler.send_header("transfer-encoding", "chunked")
    handler.end_headers()
    with contextlib.suppress(OSError):
        while handler.command != "HEAD" and not handler.owner.stopping.is_set():
            handler.wfile.write(b"1000\r\n" + bytes(4096) + b"\r\n")


def _large(handler: Any) -> None:
    handler.answer(200, b"", content_length=str(LIMIT + 1))


def _compressed(handler: Any) -> None:
    handler.answer(200, b"x", content_encoding="gzip")


def _redirect(target: str) -> Behaviour:
    return lambda handler: handler.answer(302, b"", location=target)


HOSTILE: dict[str, tuple[Behaviour, tuple[int, str]]] = {
    "a length that lies": (_lies_short, (503, "adapter_source_unavailable")),
    "an endless body": (_endless, (413, "adapter_too_large")),
    "too large as told": (_large, (413, "adapter_too_large")),
    "a bomb": (_compressed, (503, "adapter_source_unavailable")),
    "metadata": (
        _redirect("http://169.254.169.254/latest/meta-data/"),
        (403, "adapter_source_not_allowed"),
    ),
    "metadata over https": (
        _redirect("https://169.254.169.254/latest"),
        (403, "adapter_source_not_allowed"),
    ),
    "a file": (_redirect("file:///etc/passwd"), (403, "adapter_source_not_allowed")),
    "upwards": (_redirect("/lora/../other"), (403, "adapter_source_not_allowed")),
    "itself": (_redirect(f"/lora/zh/{WEIGHTS}"), (503, "adapter_source_unavailable")),
    "not for us": (lambda handler: handler.answer(500, b""), (503, "adapter_source_unavailable")),
}


@pytest.mark.parametrize("name", HOSTILE)
async def test_hostile_servers(
    tmp_path: Path, server: FileServer, adapter: Path, name: str
) -> None:
    server.put("/lora/zh", adapter)
    server.put("/other", adapter)
    behaviour, refusal = HOSTILE[name]
    server.behaves[f"/lora/zh/{WEIGHTS}"] = behaviour
    async with _gateway(tmp_path, f"https://127.0.0.1:{server.port}/lora") as (client, _):
        answer = await _add(client, f"https://127.0.0.1:{server.port}/lora/zh")
        assert _error(answer) == refusal, answer.text
        assert await _records(client) == []
    assert not any(target.startswith("/other") for _, target in server.asked)


async def test_a_redirect_within_what_is_allowed_is_followed(
    tmp_path: Path, server: FileServer, adapter: Path
) -> None:
    server.put("/cdn/1", adapter)
    server.put("/lora/zh", adapter)
    server.behaves[f"/lora/zh/{WEIGHTS}"] = _redirect(f"/cdn/1/{WEIGHTS}?sig=1")
    base = f"https://127.0.0.1:{server.port}"
    async with _gateway(tmp_path, f"{base}/lora", f"{base}/cdn") as (client, _):
        answer = await _add(client, base.replace("//", "//me:pw@") + "/lora/zh")
        assert answer.status_code == 201, answer.text
    sent = dict(zip(server.asked, server.authorization, strict=True))
    assert sent["GET", f"/cdn/1/{WEIGHTS}?sig=1"] is None  # the redirect gets no password


async def test_five_redirects_are_followed_and_not_six(
    tmp_path: Path, server: FileServer, adapter: Path
) -> None:
    for number in range(1, 7):
        server.put(f"/{number}", adapter)
        server.behaves[f"/{number}/{WEIGHTS}"] = _redirect(f"/{number - 1}/{WEIGHTS}")
    server.put("/0", adapter)
    base = f"https://127.0.0.1:{server.port}"
    async with _gateway(tmp_path, base) as (client, _):
        assert (await _add(client, f"{base}/5")).status_code == 201
        assert _error(await _add(client, f"{base}/6")) == (503, "adapter_source_unavailable")


async def test_plain_http_and_a_certificate_of_nobody_are_refused(
    tmp_path: Path, server: FileServer, adapter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.put("/zh", adapter)
    monkeypatch.delenv("SSL_CERT_FILE")
    source = f"https://127.0.0.1:{server.port}/zh"
    async with _gateway(tmp_path, source) as (client, _):
        assert _error(await _add(client, source)) == (503, "adapter_source_unavailable")
    assert server.asked == []


def _published(server: FileServer, at: str, tmp_path: Path) -> None:
    """Serve a release whose files are replaced while the gateway reads it.

    The first GET of the configuration publishes the second release. Both have files of the same
    sizes.
    """
    server.put(at, write_peft(tmp_path / "first", qv_tensors(seed=1), lora_alpha=8))
    write_peft(tmp_path / "second", qv_tensors(seed=2), lora_alpha=9)
    config = f"{at}/adapter_config.json"

    def publishes(handler: Any) -> None:
        first = server.files[config]
        if handler.command == "GET":
            del server.behaves[config]
            server.put(at, tmp_path / "second")
        handler.file(first)

    server.behaves[config] = publishes


async def _is_the_second_release_alone(
    client: httpx.AsyncClient, source: str, tmp_path: Path
) -> None:
    mixed = await _add(client, source)
    assert _error(mixed) == (503, "adapter_source_unavailable"), mixed.text
    assert await _records(client) == []
    again = await _add(client, source)
    assert again.status_code == 201, again.text
    second = await _upload(client, "second", tmp_path / "second")
    assert second.json()["versions"][0]["digest"] == again.json()["versions"][0]["digest"]


async def test_two_releases_are_never_mixed_over_https(tmp_path: Path, server: FileServer) -> None:
    _published(server, "/zh", tmp_path)
    source = f"https://127.0.0.1:{server.port}/zh"
    async with _gateway(tmp_path, source) as (client, _):
        await _is_the_second_release_alone(client, source, tmp_path)


async def test_two_releases_are_never_mixed_from_s3(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with S3Server() as s3:
        _published(s3, "/bucket/zh", tmp_path)
        for name, value in s3.environment.items():
            monkeypatch.setenv(name, value)
        async with _gateway(tmp_path, "s3://bucket/zh") as (client, _):
            await _is_the_second_release_alone(client, "s3://bucket/zh", tmp_path)


async def test_two_releases_are_never_mixed_from_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rename replaces the folder, as docs/lora-sources.md says, after its config was read."""
    folder = write_peft(tmp_path / "zh", qv_tensors(seed=1), lora_alpha=8)
    second = write_peft(tmp_path / "second", qv_tensors(seed=2), lora_alpha=9)
    shutil.copytree(second, tmp_path / "next")
    read_bytes = Path.read_bytes

    def publishes(path: Path) -> bytes:
        read = read_bytes(path)
        if path == folder / "adapter_config.json" and (tmp_path / "next").exists():
            folder.rename(tmp_path / "first")
            (tmp_path / "next").rename(folder)
        return read

    monkeypatch.setattr(Path, "read_bytes", publishes)
    async with _gateway(tmp_path, str(folder)) as (client, _):
        await _is_the_second_release_alone(client, str(folder), tmp_path)


async def test_on_a_full_disk_one_is_refused_by_name_until_there_is_room(
    tmp_path: Path, server: FileServer, adapter: Path
) -> None:
    server.put("/zh", adapter)
    source = f"https://127.0.0.1:{server.port}/zh"
    beyond_memory = tmp_path / "large"
    beyond_memory.mkdir()
    (beyond_memory / WEIGHTS).write_bytes(bytes(1024 * 1024 + LIMIT // 2))
    async with _gateway(tmp_path, source) as (client, _):
        with full_disk(64):
            fetched = await _add(client, source)
            uploaded = await _upload(client, "here", adapter)
            spooled = await _upload(client, "large", beyond_memory)
        for refused in (fetched, uploaded, spooled):
            assert _error(refused) == (500, "adapter_store_error"), refused.text
        assert await _records(client) == []
        assert (await _add(client, source)).status_code == 201
        assert (await _upload(client, "here", adapter)).status_code == 201


async def test_a_fetch_begins_while_the_folder_of_another_goes(
    tmp_path: Path, server: FileServer, adapter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.put("/zh", adapter)
    source = f"https://127.0.0.1:{server.port}/zh"
    iterdir = Path.iterdir

    def ends(folder: Path) -> Iterator[Path]:
        listed = list(iterdir(folder))
        if folder.name == "@incoming":
            for other in listed:
                other.rmdir()
        return iter(listed)

    async with _gateway(tmp_path, source) as (client, _):
        (tmp_path / "model" / "adapters" / "@incoming" / "other").mkdir(parents=True)
        with monkeypatch.context() as patched:
            patched.setattr(Path, "iterdir", ends)
            answer = await _add(client, source)
        assert answer.status_code == 201, answer.text


async def test_the_command_names_sources_and_uploads_folders(
    tmp_path: Path, server: FileServer, adapter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.put("/zh", adapter)
    base = f"https://127.0.0.1:{server.port}"
    async with _gateway(tmp_path, f"{base}/zh") as (client, _):
        monkeypatch.setenv("GATEWAY_URL", str(client.base_url))
        monkeypatch.setenv("GATEWAY_ADMIN_KEY", ADMIN)

        def lora(*words: str) -> subprocess.CompletedProcess[str]:
            command = [sys.executable, "-m", "ops", "lora", *words]
            return subprocess.run(command, capture_output=True, text=True, check=False)

        def add(*words: str) -> subprocess.CompletedProcess[str]:
            return lora(*words, "--base", MODEL)

        fetched = await asyncio.to_thread(add, "add", "zh", f"{base}/zh")
        assert json.loads(fetched.stdout)["versions"][0]["source"] == f"{base}/zh"
        uploaded = await asyncio.to_thread(add, "add", "here", str(adapter))
        assert json.loads(uploaded.stdout)["versions"][0]["source"] == "upload"
        refused = await asyncio.to_thread(add, "add", "ja", f"{base}/ja")
        assert refused.returncode == 1
        assert "GATEWAY_ADAPTER_SOURCES" in refused.stderr
        listed = (await asyncio.to_thread(lora, "list")).stdout.splitlines()
        assert [line.rpartition("\t")[2] for line in listed] == ["upload", f"{base}/zh"]


async def test_a_silent_server_ends_with_the_deadline_and_with_the_client(
    tmp_path: Path, server: FileServer, adapter: Path
) -> None:
    server.put("/zh", adapter)
    silent, begun = threading.Event(), threading.Event()

    def drips(handler: Any) -> None:
        """Send header bytes without end, so often that no read timeout applies."""
        begun.set()
        with contextlib.suppress(OSError):
            handler.wfile.write(b"HTTP/1.1 200 OK\r\nx: ")
            while not handler.owner.stopping.wait(0.05):
                handler.wfile.write(b"x")
        silent.set()

    server.behaves["/zh/adapter_config.json"] = drips
    source = f"https://127.0.0.1:{server.port}/zh"
    async with _gateway(tmp_path, source, adapter_source_timeout=1.0) as (client, _):
        late = await _add(client, source)
        assert _error(late) == (503, "adapter_source_unavailable")
        assert late.headers["retry-after"] == "5"
        await becomes(silent.is_set)
    shutil.rmtree(tmp_path / "model")
    silent.clear()
    begun.clear()
    async with _gateway(tmp_path, source) as (client, service):
        asking = asyncio.create_task(_add(client, source))
        await becomes(begun.is_set)
        # The gateway answers other requests while this fetch hangs.
        assert (await client.get("/health/ready")).status_code == 200
        asking.cancel()
        await becomes(silent.is_set)
        del server.behaves["/zh/adapter_config.json"]
        assert (await _add(client, source)).status_code == 201
        assert [record.name for record in service.adapters.records] == ["zh"]


async def test_a_disk_that_hangs_ends_with_the_deadline_and_keeps_no_others_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    back, hanging, isdir = threading.Event(), threading.Event(), os.path.isdir

    def hangs(path: Any) -> bool:
        """Block for paths below /hung/, like a network mount whose server is gone."""
        if str(path).startswith("/hung/"):
            hanging.set()
            back.wait()
        return isdir(path)

    monkeypatch.setattr(os.path, "isdir", hangs)
    try:
        async with _gateway(tmp_path, "/hung", adapter_source_timeout=2.0) as (client, _):
            # More requests than asyncio's default executor has threads.
            asking = [asyncio.create_task(_add(client, f"/hung/{n}")) for n in range(40)]
            await becomes(hanging.is_set)
            for answer in await asyncio.wait_for(asyncio.gather(*asking), 60):
                assert _error(answer) == (503, "adapter_source_unavailable")
            await asyncio.wait_for(asyncio.to_thread(int), 60)
            assert not back.is_set()
    finally:
        back.set()
