"""Generator of tables and lists in README.md and docs/: ``python -m docs.generate``.

The generator replaces each section between ``<!-- begin: NAME -->`` and ``<!-- end: NAME -->`` with
Markdown that it derives from the code. It also writes the PrometheusRule manifest for Kubernetes
from deploy/prometheus/alerts.yml. `tests/docs/test_readme.py` fails if a file is out of date.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import re
import tempfile
import textwrap
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from pathlib import Path

import yaml
from prometheus_client.metrics import MetricWrapperBase

from docs.generate_reference import format_commands, format_configuration, format_table
from gateway.api.failures import TABLE
from gateway.api.openai.generation_request import GenerationRequest
from gateway.api.openai.parameter_table import HARMLESS, HINTS, NOT_SERVED
from gateway.api.openai.renamed_parameters import RENAMED
from gateway.api.openai.schemas import ChatCompletionRequest, CompletionRequest
from gateway.config.adapter_settings import AdapterSettings
from gateway.config.database_settings import DatabaseSettings
from gateway.config.request_settings import RequestSettings
from gateway.config.settings import (
    ConversationSettings,
    LogSettings,
    ServerSettings,
    Settings,
    TenantSettings,
)
from gateway.config.triton_settings import TritonSettings
from gateway.service_setup import load_prompts, run_service
from gateway.triton import names
from ops.commands.up import DEMO_MODEL
from ops.deployment.fields import FIELDS

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
DECISIONS = ROOT / "docs/decisions"
FILES = (README, DECISIONS / "README.md", *sorted((ROOT / "docs").glob("*.md")))

ALERTS = ROOT / "deploy/prometheus/alerts.yml"
PROMETHEUS_RULE = ROOT / "deploy/kubernetes/components/monitoring/prometheus-rule.yaml"
_RULE_HEAD = """\
# Written from deploy/prometheus/alerts.yml by `python -m docs.generate`: change that file.
apiVersion: monitoring.coreos.com/v1
kind: PrometheusRule
metadata:
  name: gateway
spec:
"""

# The settings that README.md shows. docs/settings.md has all settings.
_MAIN_SETTINGS = (
    *("host", "port", "workers", "model_name", "tokenizer_dir", "triton_grpc", "max_seq_len"),
    *("config", "admin_key", "admin_port", "database_url", "redis_url", "store_dir"),
)
# Classes of settings, in the order of the sections in docs/settings.md. The docstring of a class is
# the heading of its section.
_SETTING_GROUPS = (
    *(ServerSettings, TritonSettings, RequestSettings, TenantSettings, AdapterSettings),
    *(DatabaseSettings, ConversationSettings, LogSettings),
)
_MARKED = re.compile(r"(<!-- begin: ([\w ]+) -->\n).*?(<!-- end: \2 -->)", re.DOTALL)


def name(path: Path) -> str:
    """Return the path of a file relative to the repository, such as docs/lora.md."""
    return path.relative_to(ROOT).as_posix()


def sections() -> dict[str, Callable[[], str]]:
    return {
        "alerts": _alerts,
        "command line": format_commands,
        "configuration file": format_configuration,
        "decisions": _decisions,
        "errors": _errors,
        "main settings": lambda: _settings_table(_MAIN_SETTINGS),
        "metrics": _metrics,
        "parameters": _parameters,
        "repository fields": _repository_fields,
        "settings": _settings,
        "tensor names": _tensor_names,
    }


def update_sections(text: str) -> str:
    """Return a page with its generated sections replaced by the current output of the generator.

    Raises KeyError if a section has a name that is not in `sections`.
    """
    return _MARKED.sub(lambda match: match[1] + _section(match[2]) + match[3], text)


def list_sections(text: str) -> set[str]:
    """Return the names of the generated sections in a page."""
    return {match[2] for match in _MARKED.finditer(text)}


@cache
def _section(name: str) -> str:
    return sections()[name]()


def _decisions() -> str:
    by_subject: dict[str, list[str]] = {}
    for path in sorted(DECISIONS.glob("[0-9]*.md")):
        title, _, subject, *_ = path.read_text(encoding="utf-8").splitlines()
        named = re.match(r"Subject: (.*?)\. Code: ", subject)
        if named is None:
            raise ValueError(f"{path}: the third line names no subject and code")
        item = f"- [{title.removeprefix('# ')}]({path.name})"
        by_subject.setdefault(named[1], []).append(item)
    return "\n".join(
        f"## {subject}\n\n" + "".join(f"{item}\n" for item in items)
        for subject, items in sorted(by_subject.items())
    )


def _errors() -> str:
    rows = []
    for kind, row in sorted(TABLE.items(), key=lambda item: (item[1].status, item[1].code or "")):
        meaning = inspect.getdoc(kind)
        if meaning is None or kind.__doc__ is None:
            raise ValueError(
                f"{kind.__name__} has no docstring: it is its meaning in docs/errors.md"
            )
        code = "" if row.code is None else f"`{row.code}`"
        rows.append((str(row.status), code, " ".join(meaning.partition("\n\n")[0].split())))
    return format_table(("status", "code", "meaning"), rows)


def _settings() -> str:
    listed = [name for group in _SETTING_GROUPS for name in group.model_fields]
    assert listed == [*Settings.model_fields], "a group of settings is missing, or out of order"
    return "\n".join(
        f"## {(group.__doc__ or '').rstrip('.')}\n\n{_settings_table(group.model_fields)}"
        for group in _SETTING_GROUPS
    )


def _settings_table(wanted: Iterable[str]) -> str:
    rows = []
    for name in wanted:
        field = Settings.model_fields[name]
        default = field.get_default(call_default_factory=True)
        shown = "" if default in (None, {}, "") else f"`{default}`"
        shown = "required" if field.is_required() else shown
        rows.append((f"`GATEWAY_{name.upper()}`", shown, f"{field.description}"))
    return format_table(("variable", "default", "meaning"), rows)


def _parameters() -> str:
    chat = set(ChatCompletionRequest.model_fields) - set(GenerationRequest.model_fields)
    completions = set(CompletionRequest.model_fields) - set(GenerationRequest.model_fields)
    both = (chat & completions) | set(GenerationRequest.model_fields)
    rows = {name: _format_refused(NOT_SERVED[name]) for name in NOT_SERVED}
    rows |= {name: f"read as `{renamed.path}`" for name, renamed in RENAMED.items()}
    rows |= dict.fromkeys(HARMLESS, "accepted without effect")
    rows |= dict.fromkeys(HINTS, "accepted without effect, and named in `x-ignored-parameters`")
    rows |= dict.fromkeys(both, "served")
    rows |= {name: _format_served("/v1/chat/completions", name) for name in chat - both}
    rows |= {name: _format_served("/v1/completions", name) for name in completions - both}
    return format_table(
        ("parameter", "treatment"), ((f"`{name}`", rows[name]) for name in sorted(rows))
    )


def _format_served(endpoint: str, name: str) -> str:
    elsewhere = f"; elsewhere {_format_refused(NOT_SERVED[name])}" if name in NOT_SERVED else ""
    return f"served by {endpoint}{elsewhere}"


def _format_refused(neutral: tuple[object, ...]) -> str:
    """Return the treatment of a refused parameter, such as "refused, unless `1`".

    `neutral` has the values that are accepted because they are the default behaviour.
    """
    shown = list(dict.fromkeys(json.dumps(value) for value in neutral))
    return "refused" + (f", unless {' or '.join(f'`{value}`' for value in shown)}" * bool(shown))


def _repository_fields() -> str:
    return format_table(
        ("field or option", "value"), ((f"`{name}`", text) for name, text in FIELDS.items())
    )


def _tensor_names() -> str:
    """Return the Markdown table with the old and new names of renamed TensorRT-LLM inputs."""
    rows = ([f"`{name}`" for name in known] for known in names.RENAMED)
    return format_table(("older", "newer"), rows)


def prometheus_rule() -> str:
    """Return the PrometheusRule manifest with the alerts, for the Prometheus operator."""
    text = ALERTS.read_text(encoding="utf-8")
    # Leave out the comments before the groups, which explain how to edit alerts.yml.
    return _RULE_HEAD + textwrap.indent(text[text.index("groups:") :], "  ")


def _alerts() -> str:
    rules = yaml.safe_load(ALERTS.read_text(encoding="utf-8"))
    rows = []
    for group in rules["groups"]:
        for rule in group["rules"]:
            action = rule["annotations"]["action"].replace("|", "\\|")
            rows.append((f"`{rule['alert']}`", rule["labels"]["severity"], action))
    return format_table(("alert", "severity", "what to do"), rows)


def _metrics() -> str:
    """Return the Markdown table of the gateway's metrics.

    Metrics with equal type, labels and help text share a row.
    """
    rows: dict[tuple[str, str, str], list[str]] = {}
    for name, kind, labels, text in asyncio.run(_collect_metrics()):
        shown = ", ".join(f"`{label}`" for label in labels)
        rows.setdefault((kind, shown, text), []).append(f"`{name}`")
    return format_table(
        ("metric", "type", "labels", "meaning"),
        ((", ".join(found), *key[:2], key[2]) for key, found in rows.items()),
    )


async def _collect_metrics() -> list[tuple[str, str, tuple[str, ...], str]]:
    """Start a gateway without a Triton, and return name, type, labels and help of each metric.

    The name of a counter includes `_total`, as in a query.
    """
    with tempfile.TemporaryDirectory() as folder:
        settings = Settings(
            tokenizer_dir=DEMO_MODEL, store_dir=Path(folder), triton_grpc="127.0.0.1:1"
        )
        async with run_service(settings, load_prompts(settings)) as service:
            families = list(service.metrics.registry.collect())
            # Read the label names from the metric objects, because a collected family has label
            # names only in its samples, and most families have no samples yet.
            labels: Mapping[str, tuple[str, ...]] = {
                metric._name: tuple(metric._labelnames)
                for metric in vars(service.metrics).values()
                if isinstance(metric, MetricWrapperBase)
            }
    found = []
    for family in families:
        known = labels.get(family.name) or tuple(getattr(family, "_labelnames", ()))
        name = family.name + "_total" * (family.type == "counter")
        found.append((name, family.type, known, family.documentation))
    return sorted(found)


if __name__ == "__main__":
    for path in FILES:
        path.write_text(update_sections(path.read_text(encoding="utf-8")), encoding="utf-8")
    PROMETHEUS_RULE.write_text(prometheus_rule(), encoding="utf-8")
