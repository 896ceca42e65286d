"""The configuration file: errors name their line, and a reload applies all changes or none."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
from pathlib import Path
from typing import get_args

import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st

from gateway.config.file import Configuration, ConfigurationError, ConfigurationFile, load
from gateway.config.limits import LIMITS, LimitName, RedisUnavailablePolicies
from gateway.config.marked_yaml import MarkedYaml, YamlProblem
from gateway.config.tenants import Tenant
from gateway.troubles import Troubles

HASH = "sha256:" + "0" * 64
GOOD = f"""\
admin_keys:
  - sha256:{"1" * 64}
tenants:
  - name: acme
    keys:
      - {HASH}
    models: [demo, "acme-*"]
    requests_per_minute: 600
limits:
  when_redis_is_away:
    tokens_per_minute: refuse
"""


def _file(folder: Path, text: str) -> Path:
    path = folder / "gateway.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def _problems(folder: Path, text: str) -> list[str]:
    path = _file(folder, text)
    with pytest.raises(ConfigurationError) as found:
        load(path)
    return [line.removeprefix(f"{path}:") for line in str(found.value).splitlines()]


def test_a_whole_file(tmp_path: Path) -> None:
    configuration, _ = load(_file(tmp_path, GOOD))
    assert configuration.tenants is not None
    (acme,) = configuration.tenants
    assert (acme.name, acme.models, acme.requests_per_minute) == ("acme", ["demo", "acme-*"], 600)
    assert (acme.tokens_per_minute, acme.priority) == (None, 0)
    assert configuration.limits.when_redis_is_away.tokens_per_minute == "refuse"
    assert configuration.limits.when_redis_is_away.requests_per_minute == "local"


def test_every_limit_has_its_row_and_its_fields() -> None:
    assert set(get_args(LimitName)) == set(LIMITS) == set(RedisUnavailablePolicies.model_fields)
    assert set(LIMITS) < set(Tenant.model_fields)
    assert len({kind.code for kind in LIMITS.values()}) == len(LIMITS)


def test_every_beginning_of_a_file_asks_for_keys(tmp_path: Path) -> None:
    """A file that is read while it is being written must not switch API keys off."""
    refused = 0
    for end in range(len(GOOD)):
        try:
            configuration, _ = load(_file(tmp_path, GOOD[:end]))
        except ConfigurationError:
            refused += 1
        else:
            assert configuration.tenants is not None, GOOD[:end]
    assert 0 < refused < len(GOOD)


@pytest.mark.parametrize("text", ["", "limits: {}", "tenants:", "anonymous: false", "# tenants"])
def test_a_file_without_tenants_is_refused(tmp_path: Path, text: str) -> None:
    (problem,) = _problems(tmp_path, text)
    assert problem.startswith("1: tenants: missing, which DOES NOT TURN KEYS OFF; add the tenants")


def test_a_file_may_say_that_nobody_needs_a_key(tmp_path: Path) -> None:
    configuration, _ = load(_file(tmp_path, "anonymous: true"))
    assert (configuration.anonymous, configuration.tenants) == (True, None)
    (problem,) = _problems(tmp_path, GOOD + "anonymous: true\n")
    assert problem == "12: anonymous: not together with tenants, who have keys"


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("  - name: acme", "  - naem: acme", "4: tenants[0].naem: unknown; allowed: name, keys, "),
        ("    models: [demo", "    model: [demo", "4: tenants[0].models: missing"),
        ("600", "many", "8: tenants[0].requests_per_minute: found 'many'; must be an integer"),
        ("600", "'600'", "8: tenants[0].requests_per_minute: found '600'; must be an integer"),
        ("600", "0", "8: tenants[0].requests_per_minute: found '0'; must be greater than or equal"),
        ("600", "true", "8: tenants[0].requests_per_minute: found 'True'; must be an integer"),
        ("name: acme", "name: a/b", "4: tenants[0].name: found 'a/b'; must match pattern"),
        ("name: acme", "name: ..", "4: tenants[0].name: found '..'; must match pattern"),
        ("refuse", "wait", "11: limits.when_redis_is_away.tokens_per_minute: found 'wait'; must"),
        ("limits:", "limit:", "9: limit: unknown; allowed: admin_keys, anonymous, ten"),
        ("    tokens_per", "    token_per", "11: limits.when_redis_is_away.token_per_minute: unkn"),
        (f"- {HASH}", "- sha256:12", "6: tenants[0].keys[0]: must be `sha256:` and 64 hex digits"),
        ("1" * 64, "0" * 64, "6: tenants[0].keys[0]: used twice; it is already a key of the admin"),
        ("    models:", "    name: again\n    models:", "7: name: written twice"),
        ("limits:", "tenants: []\nlimits:", "9: tenants: written twice"),
        ('"acme-*"]', '"acme-*"', "8: not YAML: "),
        ("[demo,", "[!!python/name:os.system demo,", "7: not YAML: "),
        ("    keys:\n", "    keys: none\n", "5: tenants[0].keys: must be a list"),
        ('[demo, "acme-*"]', "demo", "7: tenants[0].models: found 'demo'; must be a list"),
    ],
)
def test_a_mistake_has_its_line(tmp_path: Path, old: str, new: str, expected: str) -> None:
    assert old in GOOD
    problems = _problems(tmp_path, GOOD.replace(old, new, 1))
    assert any(problem.startswith(expected) for problem in problems), problems


@pytest.mark.parametrize(
    ("aliases", "expected"),
    [
        ("x", "2: base_model_aliases: found 'x'; must be a list"),
        ("[x, 7]", "2: base_model_aliases[1]: found '7'; must be a string"),
        ("['']", "2: base_model_aliases[0]: found ''; must not be empty"),
        ("[x, ../x]", "2: base_model_aliases[1]: found '../x'; must be NAME or OWNER/NAME"),
        ("[o/x, O/X-FP8]", "2: base_model_aliases[1]: found 'O/X-FP8'; it is there already"),
        (str([f"x{n}" for n in range(33)]), "2: base_model_aliases: must have at most 32 items"),
    ],
)
def test_aliases_of_the_base_model_are_checked(tmp_path: Path, aliases: str, expected: str) -> None:
    problems = _problems(tmp_path, f"anonymous: true\nbase_model_aliases: {aliases}\n")
    assert any(problem.startswith(expected) for problem in problems), problems


def test_all_mistakes_are_told_at_once_in_order(tmp_path: Path) -> None:
    text = GOOD.replace("600", "x").replace("refuse", "y").replace("acme\n", "acme\n    z: 1\n")
    lines = [int(problem.partition(":")[0]) for problem in _problems(tmp_path, text)]
    assert lines == [5, 9, 12]


def test_a_tenant_twice(tmp_path: Path) -> None:
    second = f"  - name: acme\n    keys: [{HASH}]\n    models: []\n"
    problems = _problems(tmp_path, GOOD.replace("limits:", second + "limits:"))
    assert problems == [
        "9: tenants[1].name: 'acme' is used twice; first by tenants[0]",
        "10: tenants[1].keys[0]: used twice; it is already a key of acme",
    ]


def test_a_key_in_the_place_of_its_hash_is_not_repeated(tmp_path: Path) -> None:
    for text in (GOOD.replace(HASH, "sk-verysecret"), GOOD.replace("1" * 64, "sk-verysecret")):
        assert "verysecret" not in "\n".join(_problems(tmp_path, text))


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="No such file"):
        load(tmp_path / "none.yaml")
    (tmp_path / "latin.yaml").write_bytes(b"\xe4")
    with pytest.raises(ConfigurationError, match="not UTF-8"):
        load(tmp_path / "latin.yaml")


@given(st.text(alphabet="ab:-[]{}&*!?#<>|'\" \n\t\0,%@`é1", max_size=60))
@example("&a [*a]")
@example("? [a]\n: b")
@example("[" * 5000)
@example("tenants: &a [*a]")
@example("<<: {a: 1}\n<<: {b: 2}")
def test_any_text_is_read_or_refused_with_a_line(text: str) -> None:
    with contextlib.suppress(YamlProblem):
        assert MarkedYaml(text).find_line(["tenants", 0, "name"]) >= 1
        return
    with pytest.raises(YamlProblem) as found:
        MarkedYaml(text)
    assert 1 <= found.value.line <= text.count("\n") + 2


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(["tenants", "name", "keys", "models", "limits", "admin_keys", "x"]),
                inner,
                max_size=3,
            )
        ),
        max_leaves=12,
    )
)
def test_any_data_is_taken_or_refused_with_a_place(
    tmp_path_factory: pytest.TempPathFactory, data: object
) -> None:
    path = _file(tmp_path_factory.getbasetemp(), yaml.safe_dump(data, allow_unicode=True))
    with contextlib.suppress(ConfigurationError):
        load(path)
        return
    with pytest.raises(ConfigurationError) as found:
        load(path)
    assert re.match(rf"{path}:\d+: ", str(found.value))


async def test_reloads_take_all_or_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = _file(tmp_path, GOOD)
    file = ConfigurationFile(path)
    outcomes: list[bool] = []
    seen: list[Configuration] = []
    told = asyncio.Event()

    def reloaded(applied: bool) -> None:
        outcomes.append(applied)
        told.set()

    file.on_reload = reloaded
    file.subscribe(seen.append)
    watch = asyncio.create_task(file.watch(Troubles()))

    async def change(text: str, *, signal: bool = False) -> None:
        told.clear()
        _file(tmp_path, text)
        if signal:
            file.reload_now()
        await asyncio.wait_for(told.wait(), 60)

    await change(GOOD.replace("acme\n", "other\n"))
    assert (outcomes, file.current.tenants[0].name) == ([True], "other")  # type: ignore[index]
    with caplog.at_level(logging.ERROR):
        await change(GOOD.replace("600", "x"))
    assert f"{path}:8: tenants[0].requests_per_minute" in caplog.text
    assert (outcomes, file.current.tenants[0].name) == ([True, False], "other")  # type: ignore[index]
    await change(GOOD, signal=True)
    assert (outcomes, file.current.tenants[0].name) == ([True, False, True], "acme")  # type: ignore[index]
    told.clear()
    path.unlink()
    await asyncio.wait_for(told.wait(), 60)
    assert outcomes[-1] is False
    names = [configuration.tenants[0].name for configuration in seen]  # type: ignore[index]
    assert names == ["acme", "other", "acme"]
    watch.cancel()


async def test_a_file_that_is_being_written_is_not_read(tmp_path: Path) -> None:
    """Half of a file is not applied: it may be valid, but lack the limits of the other half."""
    path = _file(tmp_path, GOOD)
    file = ConfigurationFile(path)
    limits: list[int | None] = []
    file.subscribe(lambda now: limits.append(now.tenants[0].requests_per_minute))  # type: ignore[index]
    half = GOOD[: GOOD.index("    requests_per_minute")]
    assert load(_file(tmp_path, half))[0].tenants is not None
    watch = asyncio.create_task(file.watch(Troubles()))
    for number in range(12):  # 3 s, with pauses shorter than the polling interval
        await asyncio.sleep(0.25)
        path.write_text(half + "#" * number)
    path.write_text(GOOD.replace("600", "700"))
    async with asyncio.timeout(300):
        while limits[-1] != 700:
            await asyncio.sleep(0.05)
    watch.cancel()
    assert limits == [600, 700]


async def test_what_cannot_be_served_here_is_refused_as_a_mistake(tmp_path: Path) -> None:
    path = _file(tmp_path, GOOD)
    with pytest.raises(ConfigurationError, match="not here"):
        ConfigurationFile(path, lambda configuration: ((), "not here"))
    with pytest.raises(ConfigurationError, match="not here"):
        ConfigurationFile(None, lambda configuration: ((), "not here"))


def test_replicas_are_endpoints_or_mappings(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    start = "anonymous: true\nreplicas:\n"
    entries = "  - a:1\n  - endpoint: b:1\n    weight: 0\n  - {endpoint: c:1, drain: true}\n"
    path.write_text(start + entries)
    found = load(path)[0].replicas
    assert found is not None
    assert [(r.endpoint, r.weight, r.drain) for r in found] == [
        ("a:1", 100, False),
        ("b:1", 0, False),
        ("c:1", 100, True),
    ]


@pytest.mark.parametrize(
    ("entry", "expected"),
    [
        ("nonsense", "replicas[0].endpoint: found 'nonsense'; must be host:port"),
        ("{endpoint: a:1, weight: -1}", "replicas[0].weight: found '-1'; must be greater than"),
        ("{endpoint: a:1, weight: .inf}", "replicas[0].weight: found 'inf'; must be a number"),
        ("{endpoint: a:1, weight: lots}", "replicas[0].weight: found 'lots'; must be a number"),
        ("{endpoint: a:1, wieght: 1}", "replicas[0].wieght: unknown; allowed: endpoint, weight"),
        ("{weight: 1}", "replicas[0].endpoint: missing"),
        ("a:1\n  - {endpoint: a:1, weight: 3}", "replicas[1]: 'a:1' is there twice"),
    ],
)
def test_a_replica_that_is_none_has_its_line(tmp_path: Path, entry: str, expected: str) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(f"anonymous: true\nreplicas:\n  - {entry}\n")
    with pytest.raises(ConfigurationError) as error:
        load(path)
    line = 4 if "\n" in entry else 3
    assert f":{line}: {expected}" in str(error.value)
