"""An operator's tasks with adapters, through HTTP and `gateway lora`, against the real stack."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from safetensors.numpy import save_file

from ops.commands.up import DEMO_MODEL
from tests.support.generated_adapters import PROMPT, TOKENS, write_adapter
from tests.support.local_stack import Stack, Up
from tests.support.lora_files import CONFIG, key, pair, write_peft
from tests.support.patience import PATIENCE_S

Change = Callable[[Path], None]


@pytest.fixture
def admin(stack: Stack, up: Up) -> Iterator[httpx.Client]:
    """Yield a client with the admin key. Adapters that a test registers are removed afterwards."""
    headers = {"authorization": f"Bearer {(up.state_dir / 'admin_key').read_text()}"}
    with httpx.Client(base_url=stack.gateway, headers=headers, timeout=60) as client:
        before = _names(client)
        yield client
        for name in _names(client) - before:
            assert client.delete(f"/v1/adapters/{name}").status_code == 200


def _names(admin: httpx.Client) -> set[str]:
    return {record["name"] for record in admin.get("/v1/adapters").json()["data"]}


def _upload(admin: httpx.Client, name: str, folder: Path, base: str = "demo") -> httpx.Response:
    files = [("file", (path.name, path.read_bytes())) for path in sorted(folder.iterdir())]
    return admin.post("/v1/adapters", data={"name": name, "base": base}, files=files)


def _shapes(up: Up) -> Path:
    """Return the engine's folder, or the model's folder in modes without a built engine."""
    engine = up.state_dir / "engine"
    return engine if engine.is_dir() else DEMO_MODEL


def _answer(client: openai.OpenAI, model: str) -> str:
    answer = client.completions.create(model=model, prompt=PROMPT, max_tokens=TOKENS, temperature=0)
    assert answer.model == model
    return answer.choices[0].text


def test_an_adapter_from_upload_to_removal(
    admin: httpx.Client, client: openai.OpenAI, tmp_path: Path
) -> None:
    base_answer = _answer(client, "demo")
    first = write_adapter(tmp_path / "1", DEMO_MODEL, seed=1)
    added = _upload(admin, "mine", first)
    assert added.status_code == 201, added.text
    version_1 = added.json()["served"]
    assert "mine" in {model.id for model in client.models.list().data}
    model = client.models.retrieve("mine").model_extra or {}
    assert (model["root"], model["parent"]) == (f"mine@{version_1}", "demo")
    answer_1 = _answer(client, "mine")
    assert answer_1 != base_answer

    second = write_adapter(tmp_path / "2", DEMO_MODEL, seed=2)
    version_2 = _upload(admin, "mine", second).json()["served"]
    answer_2 = _answer(client, "mine")
    assert answer_2 != answer_1
    assert _answer(client, f"mine@{version_1}") == answer_1
    assert _answer(client, f"mine@{version_2}") == answer_2

    assert admin.post("/v1/adapters/mine/rollback", json={}).json()["served"] == version_1
    assert _answer(client, "mine") == answer_1
    body = {"version": version_2}
    assert admin.post("/v1/adapters/mine/rollback", json=body).json()["served"] == version_2
    assert admin.post("/v1/adapters/mine/verify").json()["verified"] is True

    assert admin.delete("/v1/adapters/mine").json()["deleted"] is True
    with pytest.raises(openai.NotFoundError):
        _answer(client, "mine")
    assert admin.get("/v1/adapters/mine").status_code == 404


def test_the_exact_version_is_in_a_header(
    admin: httpx.Client, client: openai.OpenAI, tmp_path: Path
) -> None:
    folder = write_adapter(tmp_path / "a", DEMO_MODEL, seed=3)
    version = _upload(admin, "tagged", folder).json()["served"]
    raw = client.completions.with_raw_response
    for stream in (False, True):
        response = raw.create(model="tagged", prompt=PROMPT, max_tokens=2, stream=stream)
        assert response.headers["x-adapter-version"] == f"tagged@{version}"
    assert "x-adapter-version" not in raw.create(model="demo", prompt="x", max_tokens=1).headers


def test_the_same_content_again_changes_nothing(admin: httpx.Client, tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "a", DEMO_MODEL, seed=4)
    first, again = (_upload(admin, "same", folder).json() for _ in range(2))
    # `placement` may differ: replicas with their own disk load the adapter between the two uploads.
    for version in (*first["versions"], *again["versions"]):
        assert set(version.pop("placement").values()) <= {"held", "on its way"}
    assert again["versions"] == first["versions"]
    # The same tensors under another name get the same task id, so the engine caches them once.
    other = _upload(admin, "same-too", folder).json()
    assert other["versions"][0]["task_id"] == first["versions"][0]["task_id"]


def _corrupt(folder: Path) -> None:
    path = folder / "adapter_model.safetensors"
    path.write_bytes(b"\xff" * 16 + path.read_bytes()[16:])


def _truncate(folder: Path) -> None:
    path = folder / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def _config(**changes: Any) -> Change:
    def change(folder: Path) -> None:
        path = folder / "adapter_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return change


def _nan(folder: Path) -> None:
    module = "model.layers.0.self_attn.q_proj"
    tensors = pair(module, 2, (256, 256))
    tensors[key(module, "B")][0, 0] = np.nan
    write_peft(folder, tensors, r=2)


def _high_rank(folder: Path) -> None:
    write_peft(folder, pair("model.layers.0.self_attn.q_proj", 65, (256, 256)), r=65)


def _pickle_only(folder: Path) -> None:
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (_corrupt, "adapter_file_corrupt"),
        (_truncate, "adapter_file_corrupt"),
        (_nan, "adapter_not_finite"),
        (_high_rank, "adapter_rank_invalid"),
        (_pickle_only, "adapter_pickle_refused"),
        (_config(base_model_name_or_path="other/llama"), "adapter_base_mismatch"),
        (_config(use_dora=True), "adapter_feature_unsupported"),
        (_config(modules_to_save=["lm_head"]), "adapter_feature_unsupported"),
    ],
)
def test_a_bad_adapter_is_refused_and_leaves_no_trace(
    admin: httpx.Client, tmp_path: Path, up: Up, change: Change, code: str
) -> None:
    folder = write_adapter(tmp_path / "bad", DEMO_MODEL, seed=5)
    change(folder)
    before = _files(up), _names(admin)
    response = _upload(admin, "bad", folder)
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (400, code), error
    assert error["param"]
    assert (_files(up), _names(admin)) == before


def _files(up: Up) -> set[str]:
    return {str(path) for path in (up.state_dir / "adapters").rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    "name", ["../evil", "a/b/c", "", "x" * 80, "a b", "demo", "n@0123456789ab"]
)
def test_bad_names_are_refused(admin: httpx.Client, tmp_path: Path, name: str) -> None:
    response = _upload(admin, name, write_adapter(tmp_path / "a", DEMO_MODEL, seed=6))
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == "name"


def test_a_tenants_namespace(admin: httpx.Client, client: openai.OpenAI, tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "a", DEMO_MODEL, seed=7)
    assert _upload(admin, "acme/support", folder).status_code == 201
    assert client.models.retrieve("acme/support").id == "acme/support"
    assert _answer(client, "acme/support")


def test_the_wrong_base_is_refused(admin: httpx.Client, tmp_path: Path) -> None:
    response = _upload(admin, "x", write_adapter(tmp_path / "a", DEMO_MODEL, seed=8), base="llama")
    assert response.json()["error"]["code"] == "adapter_base_mismatch"


@pytest.mark.parametrize("filename", ["../../evil.py", "/etc/passwd", "model.py", ".."])
def test_other_file_names_are_refused(admin: httpx.Client, filename: str) -> None:
    files = [("file", (filename, b"x"))]
    response = admin.post("/v1/adapters", data={"name": "n", "base": "demo"}, files=files)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "file"


def test_admin_endpoints_need_the_key(stack: Stack, admin: httpx.Client, tmp_path: Path) -> None:
    _upload(admin, "kept", write_adapter(tmp_path / "a", DEMO_MODEL, seed=14))
    for method, path in [
        ("GET", "/v1/adapters"),
        ("POST", "/v1/adapters"),
        ("GET", "/v1/adapters/kept"),
        ("DELETE", "/v1/adapters/kept"),
        ("POST", "/v1/adapters/kept/rollback"),
        ("POST", "/v1/load_lora_adapter"),
        ("POST", "/v1/unload_lora_adapter"),
    ]:
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "Bearer \u00e9"}):
            encoded = {name: value.encode("latin-1") for name, value in headers.items()}
            response = httpx.request(
                method, stack.gateway + path, headers=encoded, timeout=PATIENCE_S
            )
            assert response.status_code == 401
            assert response.json()["error"]["code"] == "invalid_api_key"
    assert "kept" in _names(admin)


def test_vllms_calls(admin: httpx.Client, up: Up) -> None:
    root = up.adapter_root
    write_adapter(root / "vllm", DEMO_MODEL, seed=9)
    body = {"lora_name": "v", "lora_path": str(root / "vllm")}
    loaded = admin.post("/v1/load_lora_adapter", json=body)
    assert (loaded.status_code, "added successfully" in loaded.text) == (200, True), loaded.text
    assert admin.post("/v1/load_lora_adapter", json=body).status_code == 400
    escape = admin.post(
        "/v1/load_lora_adapter", json=body | {"lora_name": "w", "lora_path": "/etc"}
    )
    assert escape.status_code == 400
    (root / "link").mkdir()
    (root / "link" / "adapter_config.json").symlink_to("/etc/hostname")
    body = {"lora_name": "w", "lora_path": "link"}
    response = admin.post("/v1/load_lora_adapter", json=body)
    assert response.json()["error"]["code"] == "adapter_path_outside_root"
    assert admin.post("/v1/unload_lora_adapter", json={"lora_name": "v"}).status_code == 200
    assert admin.post("/v1/unload_lora_adapter", json={"lora_name": "v"}).status_code == 404


def _lora(up: Up, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "ops", "lora", *arguments]
    if arguments[0] != "size":
        command += ["--state-dir", str(up.state_dir)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


@pytest.mark.slow
def test_the_command_line(
    admin: httpx.Client, client: openai.OpenAI, up: Up, tmp_path: Path
) -> None:
    folder = str(write_adapter(tmp_path / "a", DEMO_MODEL, seed=10))
    added = _lora(up, "add", "cli", folder, "--base", "demo")
    assert added.returncode == 0, added.stderr
    version = json.loads(added.stdout)["served"]
    assert f"cli\tdemo\t{version}\t1 version(s)" in _lora(up, "list").stdout
    assert json.loads(_lora(up, "show", "cli").stdout)["served"] == version
    assert json.loads(_lora(up, "verify", "cli").stdout)["verified"] is True
    write_adapter(tmp_path / "b", DEMO_MODEL, seed=11)
    _lora(up, "add", "cli", str(tmp_path / "b"), "--base", "demo")
    assert json.loads(_lora(up, "rollback", "cli").stdout)["served"] == version
    assert json.loads(_lora(up, "remove", "cli").stdout)["deleted"] is True
    gone = _lora(up, "show", "cli")
    assert (gone.returncode, "cli" in gone.stderr) == (1, True)
    refused = _lora(up, "add", "demo", folder, "--base", "demo")
    assert (refused.returncode, "name" in refused.stderr) == (1, True)
    size = _lora(up, "size", str(_shapes(up)), folder, "--count", "200")
    assert "adapters: 200" in size.stdout, size.stderr
    assert "lora_cache_host_memory_bytes:" in size.stdout


def test_converted_adapters_are_imported(
    admin: httpx.Client, client: openai.OpenAI, up: Up, tmp_path: Path
) -> None:
    from adapters import npy  # noqa: PLC0415
    from tests.support.generated_adapters import convert_folder  # noqa: PLC0415

    folder = write_adapter(tmp_path / "a", DEMO_MODEL, seed=12)
    assert _upload(admin, "peft", folder).status_code == 201
    (tmp_path / "npy").mkdir()
    npy.write(convert_folder(folder, _shapes(up)), tmp_path / "npy")
    imported = _lora(up, "import-npy", "npy", str(tmp_path / "npy"), "--base", "demo")
    assert imported.returncode == 0, imported.stderr
    assert _answer(client, "npy") == _answer(client, "peft")


def test_an_upload_past_the_limit_is_refused(admin: httpx.Client, up: Up, tmp_path: Path) -> None:
    folder = tmp_path / "big"
    folder.mkdir()
    save_file({"x": np.zeros(3 * 1024 * 1024, np.float32)}, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(CONFIG))
    response = _upload(admin, "big", folder)
    assert response.status_code == 413
    assert "big" not in _names(admin)


@pytest.mark.token_mode_only("adapters are read from its disk and never sent", of=["llmapi"])
def test_metrics(stack: Stack, admin: httpx.Client, client: openai.OpenAI, tmp_path: Path) -> None:
    _upload(admin, "counted", write_adapter(tmp_path / "a", DEMO_MODEL, seed=13))
    _answer(client, "counted")
    _answer(client, "counted")
    text = httpx.get(stack.gateway + "/metrics", timeout=PATIENCE_S).text
    sent = 'gateway_lora_cold_sends_total{adapter="counted",cause="first_use"} 1.0'
    assert sent in text
    assert 'gateway_completion_tokens_total{model="counted"}' in text
    assert 'lora_requests_info{max_lora="' in text
    assert "gateway_adapter_store_redis_up 1.0" in text
