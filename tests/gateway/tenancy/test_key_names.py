"""Names of tenants by their keys, before a request is authenticated."""

from __future__ import annotations

from pathlib import Path

import pytest

from gateway.config.file import Configuration
from gateway.config.settings import Settings
from gateway.config.tenants import Tenant, key_hash
from gateway.tenancy import access as module
from gateway.tenancy.access import Access
from gateway.tenancy.keys.record import make_record
from gateway.tenancy.unknown_models import UnknownModels
from gateway.troubles import Troubles

NOW = 1_800_000_000.0
_TENANT = Tenant(name="acme", keys=[key_hash("sk-of-the-file")], models=["*"])


@pytest.mark.parametrize("is_cached", [True, False])
def test_an_expired_key_names_no_tenant(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_cached: bool
) -> None:
    """A flood with an expired key must not use up the tenant's part of a busy gateway."""
    access = Access(Settings(tokenizer_dir=tmp_path), UnknownModels(Troubles()))
    access.update(Configuration(tenants=[_TENANT]))
    record, key = make_record("acme", "", 60, "sha256:" + "a" * 8)
    record = record.model_copy(update={"expires": int(NOW) + 60})
    access.set_issued_keys({record.id: record})
    clock = NOW + 59
    monkeypatch.setattr(module.time, "time", lambda: clock)
    if is_cached:
        assert access.find_tenant_name([f"Bearer {key}"]) == "acme"
    clock = NOW + 60
    assert access.find_tenant_name([f"Bearer {key}"]) == ""
    assert access.find_tenant_name(["Bearer sk-of-the-file"]) == "acme"
