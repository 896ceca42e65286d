"""Allowed dependencies between the project's packages, as a table from top to bottom.

`python -m tests.test_arrows [CHECKOUT]` prints statistics of the dependency graph.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from tests.support.imports import DIVIDED, ROOT, Sources, sources, unit_of

# Package -> packages that it may import. Each of these is further down in this table.
ALLOWED: dict[str, str] = {
    "docs": "ops.cli ops.commands ops.deployment ops.local_stack gateway.api gateway.service_setup"
    " gateway.config gateway.triton",
    "bench": "ops.loadtest ops.local_stack gateway.config gateway.scheduling gateway.tokenization"
    " gateway.triton gateway.generation"
    " triton_repo.llmapi_repository triton_repo.render triton_repo.cpu_executor adapters"
    " lora_store",
    "demo": "",
    "deploy": "",
    # Command line tools for operators.
    "ops.__main__": "ops.cli",
    "ops.cli": "ops.commands",
    "ops.commands": "ops.deployment ops.loadtest ops.client ops.local_stack ops.errors"
    " gateway.__main__ gateway.former_state gateway.database gateway.config gateway.triton"
    " gateway.errors triton_repo.fill_template"
    " lora_store adapters",
    # Deployment, from a checkpoint to a running Triton. It starts processes like the local stack.
    "ops.deployment": "ops.local_stack gateway.config gateway.triton triton_repo.render"
    " triton_repo.gpt_repository triton_repo.llmapi_repository triton_repo.parameters"
    " triton_repo.releases triton_repo.booleans triton_repo.cpu_executor adapters",
    "ops.loadtest": "ops.local_stack ops.errors gateway.tokenization gateway.triton gateway.errors",
    "ops.client": "ops.errors gateway.tokenization gateway.triton adapters",
    "ops.local_stack": "triton_repo.llmapi_repository triton_repo.render triton_repo.cpu_executor"
    " adapters",
    "ops.errors": "",
    "ops.__init__": "",
    # The gateway. `service` has all objects that live as long as the process. Modules that handle a
    # request, such as `pipeline`, get it as an argument, so they are above it.
    "gateway.__main__": "gateway.server gateway.http gateway.config",
    "gateway.server": "gateway.app gateway.api gateway.service_setup gateway.state_setup"
    " gateway.service gateway.http"
    " gateway.config gateway.scheduling gateway.observability gateway.memory lora_store",
    "gateway.app": "gateway.api gateway.service_setup gateway.conditions gateway.http"
    " gateway.config gateway.scheduling",
    # Current problems of a service, derived from its state.
    "gateway.conditions": "gateway.service gateway.replica_setup gateway.tenancy",
    # Construction and shutdown of the service. Its users need not import its parts.
    "gateway.service_setup": "gateway.service gateway.state_setup gateway.replica_setup"
    " gateway.metrics gateway.monitor gateway.tenancy gateway.catalog gateway.conversations"
    " gateway.guiding gateway.config gateway.scheduling gateway.observability"
    " gateway.tokenization gateway.troubles gateway.triton certificates",
    "gateway.api": "gateway.console gateway.monitor gateway.pipeline gateway.service"
    " gateway.scheduling gateway.tenancy gateway.catalog gateway.conversations gateway.http"
    " gateway.config"
    " gateway.observability gateway.sources gateway.tokenization gateway.generation gateway.deltas"
    " gateway.parsers gateway.web gateway.errors adapters",
    # Files for browsers.
    "gateway.web": "",
    # Data for the console, from all parts of a service.
    "gateway.console": "gateway.service gateway.monitor gateway.tenancy gateway.catalog"
    " gateway.config gateway.scheduling gateway.errors adapters",
    "gateway.pipeline": "gateway.service gateway.tenancy gateway.catalog gateway.scheduling"
    " gateway.observability"
    " gateway.tokenization gateway.triton gateway.generation gateway.stops gateway.deltas"
    " gateway.errors",
    "gateway.service": "gateway.replica_setup gateway.metrics gateway.monitor gateway.overrides"
    " gateway.tenancy gateway.catalog gateway.conversations gateway.database gateway.guiding"
    " gateway.config gateway.scheduling gateway.observability gateway.tokenization gateway.errors"
    " gateway.troubles",
    "gateway.state_setup": "gateway.metrics gateway.former_state gateway.overrides gateway.tenancy"
    " gateway.database gateway.config gateway.scheduling",
    "gateway.replica_setup": "gateway.metrics gateway.config gateway.scheduling"
    " gateway.tokenization gateway.triton",
    "gateway.metrics": "gateway.tenancy gateway.catalog gateway.conversations gateway.database"
    " gateway.config gateway.scheduling gateway.stops gateway.triton",
    # Running and ended requests, for the console and the API.
    "gateway.monitor": "gateway.observability gateway.generation gateway.stops gateway.troubles"
    " adapters",
    # What the release before stored in Redis and in files, until it is in the database.
    "gateway.former_state": "gateway.overrides gateway.tenancy gateway.database"
    " gateway.scheduling gateway.errors lora_store",
    # Replica settings that admins change at run time.
    "gateway.overrides": "gateway.database gateway.scheduling gateway.errors",
    "gateway.tenancy": "gateway.catalog gateway.database gateway.config gateway.observability"
    " gateway.generation"
    " gateway.errors gateway.troubles lora_store adapters",
    "gateway.catalog": "gateway.config gateway.sources gateway.tokenization gateway.triton"
    " gateway.generation gateway.errors gateway.troubles lora_store adapters",
    # Stored responses and conversations of tenants.
    "gateway.conversations": "gateway.errors lora_store",
    # Checks of guides before an engine gets them.
    "gateway.guiding": "gateway.tokenization gateway.generation gateway.errors guides",
    "gateway.http": "gateway.config gateway.scheduling gateway.errors certificates",
    "gateway.config": "gateway.scheduling gateway.sources gateway.parsers gateway.troubles"
    " lora_store adapters guides",
    # Sources of adapters. Only this package downloads files from other machines.
    "gateway.sources": "adapters certificates",
    "gateway.scheduling": "gateway.observability gateway.triton gateway.generation gateway.errors",
    "gateway.observability": "gateway.database gateway.generation gateway.errors adapters"
    " certificates",
    # SQLite and PostgreSQL: connections, transactions, the schema.
    "gateway.database": "gateway.errors gateway.troubles lora_store",
    "gateway.tokenization": "gateway.generation gateway.deltas gateway.parsers gateway.errors"
    " gateway.memory adapters",
    "gateway.triton": "gateway.generation gateway.stops gateway.deltas gateway.errors adapters"
    " certificates guides",
    "gateway.generation": "gateway.stops gateway.deltas gateway.parsers adapters guides",
    # Requests that end early, until the engine has stopped them.
    "gateway.stops": "",
    "gateway.deltas": "gateway.parsers",
    "gateway.parsers": "gateway.errors",
    "gateway.errors": "",
    "gateway.memory": "",
    # Reported problems that still exist.
    "gateway.troubles": "",
    "gateway.__init__": "",
    "lora_store": "adapters certificates",
    # Model repository. Triton loads each of the five models from its own folder. Only the core
    # model imports further packages, and only on a host without TensorRT-LLM. The GPT repository's
    # core model is rendered together with the modules of the other core model.
    "triton_repo.gpt": "triton_repo.tensorrt_llm",
    "triton_repo.tensorrt_llm": "triton_repo.cpu_executor triton_repo.booleans",
    "triton_repo.llmapi": "triton_repo.cpu_executor",
    "triton_repo.tensorrt_llm_bls": "triton_repo.booleans",
    "triton_repo.preprocessing": "triton_repo.booleans",
    "triton_repo.postprocessing": "triton_repo.booleans",
    # Adapters given by path are read and converted like in the gateway.
    "triton_repo.cpu_executor": "adapters guides",
    "triton_repo.llmapi_repository": "triton_repo.render triton_repo.parameters",
    "triton_repo.gpt_repository": "triton_repo.render triton_repo.parameters triton_repo.releases",
    "triton_repo.render": "triton_repo.parameters triton_repo.releases",
    "triton_repo.parameters": "triton_repo.releases",
    "triton_repo.releases": "",
    # `booleans` is rendered beside each Python model.
    "triton_repo.booleans": "",
    "triton_repo.fill_template": "",
    "triton_repo.__init__": "",
    "adapters": "",
    # TLS contexts, and reloading of changed certificate files.
    "certificates": "",
    # Guides, for the gateway and the CPU executor.
    "guides": "",
}
ORDER = {room: place for place, room in enumerate(ALLOWED)}

# Library -> packages or modules that may import it. `tests` may import all.
LIBRARIES: dict[str, str] = {
    "asyncpg": "gateway.database.postgresql",
    "dynamo": "bench.dynamo_worker",
    "fastapi": "gateway.api gateway.app bench.ordinary_gateway",
    "google": "gateway.triton bench",  # protobuf
    "grpc": "gateway.triton.grpcio",
    "hpack": "gateway.triton.http2 bench",
    "httptools": "gateway.http",
    "httpx": "ops.commands ops.loadtest gateway.sources.remote bench docs",
    "jinja2": "gateway.tokenization bench demo",
    "llguidance": "guides triton_repo.cpu_executor",
    "numpy": "gateway.triton gateway.pipeline.mapped_inputs adapters triton_repo bench",
    "opentelemetry": "gateway.observability.tracing",
    "orjson": "gateway ops.loadtest bench",
    "peft": "demo",
    "playwright": "docs",
    "prometheus_client": "gateway.metrics gateway.api docs",
    "psutil": "bench docs",
    "pydantic": "gateway.api gateway.config gateway.former_state gateway.tenancy.keys"
    " ops.deployment"
    " bench.ordinary_gateway",
    "pydantic_core": "gateway.api adapters.patterns",
    "pydantic_settings": "gateway.config",
    "redis": "lora_store gateway.tenancy.limits gateway.conversations bench",
    "s3fs": "gateway.sources.remote",
    "safetensors": "demo",
    "smg_grpc_proto": "bench.smg_worker",
    "sse_starlette": "bench.ordinary_gateway",
    "starlette": "gateway.api gateway.app",
    "tensorrt_llm": "triton_repo.tensorrt_llm triton_repo.llmapi",
    "tokenizers": "gateway.tokenization triton_repo.cpu_executor bench demo",
    "torch": "triton_repo.tensorrt_llm demo",
    # The gateway reads tokenizers itself, except those without a tokenizer.json.
    "transformers": "gateway.tokenization.prompts triton_repo.preprocessing"
    " triton_repo.postprocessing triton_repo.tensorrt_llm bench demo",
    "triton_python_backend_utils": "triton_repo",
    "tritonclient": "gateway.triton.protobuf bench",
    "uvicorn": "gateway.http bench",
    "uvloop": "bench",
    "yaml": "gateway.config ops.commands triton_repo.llmapi docs",
}

# Undocumented names of libraries without an underscore -> the only modules that may use them. A key
# is a dotted name or an attribute. `PRIVATE` has the names with an underscore.
UNDOCUMENTED: dict[str, str] = {
    "uvicorn.protocols": "gateway.http bench",
    "uvicorn.server.ServerState": "gateway.http",
    "server_state": "gateway.http",  # uvicorn.Server
    "sentinel_manager": "lora_store.connect lora_store.redis_role",  # redis-py
    "get_master_address": "lora_store.connect",  # redis-py
}
PRIVATE: dict[str, str] = {
    # The name is public in practice: upstream's own model.py imports it.
    "tensorrt_llm.llmapi.tokenizer._xgrammar_tokenizer_info": "triton_repo.tensorrt_llm",
    # Upstream's model.py imports this module too, and `demo.muon` uses torch's fused operations.
    "tensorrt_llm._utils": "triton_repo.llmapi",
    "_foreach_add_": "demo.muon",
    "_foreach_mul_": "demo.muon",
    # The field of protobuf messages that `bench` builds by hand.
    "_raw_content": "bench.transport",
    "_labelnames": "docs.generate",
    # argparse has no public way to list the options of a parser.
    "_actions": "docs.generate_reference",
    "_SubParsersAction": "docs.generate_reference",
    "_choices_actions": "docs.generate_reference",
    "_group_actions": "docs.generate_reference",
    "_mutually_exclusive_groups": "docs.generate_reference",
    "_info": "gateway.sources.remote",  # fsspec names all its coroutines like this ("Async")
}
# Names with an underscore that are documented: os, named tuples, and logging's HOWTO.
DOCUMENTED = {"_fields", "_exit", "_replace", "_srcfile"}


def _within(module: str, places: str) -> bool:
    return any(module == place or module.startswith(f"{place}.") for place in places.split())


def _told(breaches: list[str], rule: str) -> None:
    if breaches:
        pytest.fail("\n".join([rule, *sorted(set(breaches))]), pytrace=False)


def test_the_table_points_down() -> None:
    """Check the table's order, which makes cycles between packages impossible."""
    _told(
        [
            f"{room} -> {below}"
            for room, rooms in ALLOWED.items()
            for below in rooms.split()
            if ORDER.get(below, -1) <= ORDER[room]
        ],
        "An arrow of ALLOWED must point to a room further down in the table:",
    )


def test_every_file_has_a_room() -> None:
    _told(
        [file for module, file in sources().files.items() if not _in_table(module)],
        "These files stand in no room of ALLOWED: give each new room a place and its arrows there:",
    )


def test_arrows_are_in_the_table() -> None:
    _told(
        [
            f"{found}: no arrow from {unit_of(found.module)} to {unit_of(found.target)}"
            for found in sources().ours()
            if _arrow(found.module, found.target)
            and unit_of(found.target) not in ALLOWED[unit_of(found.module)].split()
        ],
        "New arrows between rooms. Pass the value, or move the type down; if the arrow is right and"
        " points down, add it to ALLOWED:",
    )


def test_the_table_has_no_arrow_that_nothing_needs() -> None:
    needed = {
        (unit_of(found.module), unit_of(found.target))
        for found in sources().ours()
        if _arrow(found.module, found.target)
    }
    _told(
        [
            f"{room} -> {below}"
            for room, rooms in ALLOWED.items()
            for below in rooms.split()
            if (room, below) not in needed
        ],
        "No import needs these arrows any more: delete them from ALLOWED:",
    )


def test_no_circle_between_files() -> None:
    circle = _circle(_graph(sources()))
    _told([] if circle is None else [" -> ".join(circle)], "Files that import each other:")


def test_no_test_file_imports_another() -> None:
    _told(
        [
            str(found)
            for found in sources().ours()
            if found.target.rpartition(".")[2].startswith("test_")
        ],
        "What tests share stands in tests/support/, and nothing imports a test file:",
    )


def test_only_tests_import_tests() -> None:
    _told(
        [
            str(found)
            for found in sources().ours()
            if unit_of(found.target) == "tests" != unit_of(found.module)
        ],
        "Only tests import from tests/:",
    )


def test_libraries_stay_in_their_rooms() -> None:
    breaches = []
    for found in sources().libraries():
        places = LIBRARIES.get(found.target.partition(".")[0], "")
        if unit_of(found.module) != "tests" and not _within(found.module, places):
            breaches.append(f"{found}: its places are {places or 'none'}")
    _told(breaches, "Libraries outside their places, which LIBRARIES lists:")


def test_private_names_of_libraries_stay_where_they_are_declared() -> None:
    """Check names with an underscore that no file of this project defines: they are a library's."""
    ours, breaches = sources().own_names | DOCUMENTED, []
    declared = PRIVATE | UNDOCUMENTED
    for found in sources().libraries():
        private = any(part.startswith("_") for part in found.target.split(".")[1:])
        listed = next((name for name in declared if _within(found.target, name)), None)
        if private or listed is not None:
            breaches += _outside(found.module, listed, declared, f"{found}")
    for module, line, name in sources().attributes:
        private = name.startswith("_") and not name.startswith("__")
        if name in declared or (private and name not in ours):
            where = f"{sources().files[module]}:{line} touches {name}"
            breaches += _outside(module, name if name in declared else None, declared, where)
    for module, line, name in sources().strings:
        if name in declared:
            where = f"{sources().files[module]}:{line} touches {name}"
            breaches += _outside(module, name, declared, where)
    _told(
        breaches,
        "Private names of libraries stand in one place each, which PRIVATE or UNDOCUMENTED lists:",
    )


def _outside(module: str, name: str | None, declared: Mapping[str, str], where: str) -> list[str]:
    if unit_of(module) == "tests" or (name is not None and _within(module, declared[name])):
        return []
    return [f"{where}: its place is {'none' if name is None else declared[name]}"]


def _in_table(module: str) -> bool:
    return unit_of(module) == "tests" or unit_of(module) in ALLOWED


def _arrow(module: str, target: str) -> bool:
    """Return True if an import crosses packages. Imports of tests are not restricted."""
    return unit_of(module) not in ("tests", unit_of(target))


def _graph(read: Sources) -> dict[str, set[str]]:
    graph: dict[str, set[str]] = defaultdict(set)
    for found in read.ours():
        if found.module != found.target:
            graph[found.module].add(found.target)
    return graph


def _circle(graph: Mapping[str, set[str]]) -> list[str] | None:
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        circle: list[str] = error.args[1]
        return circle[::-1]
    return None


def main(root: Path = ROOT) -> None:
    """Print the statistics of the checkout in `root`, using the table of this checkout."""
    read = Sources(root)
    rooms = {unit_of(module) for module in read.files} - {"tests"}
    arrows = {
        (unit_of(found.module), unit_of(found.target))
        for found in read.ours()
        if _arrow(found.module, found.target)
    }
    below: dict[str, set[str]] = {room: set() for room in rooms}
    for room, other in arrows:
        below[room].add(other)
    against = [(a, b) for a, b in arrows if a in ORDER and b in ORDER and ORDER[b] <= ORDER[a]]
    print(f"rooms: {len(rooms)} ({', '.join(DIVIDED)} divided)")
    print(f"arrows between them: {len(arrows)}")
    print(f"arrows against the order: {len(against)}")
    print(f"circle of rooms: {' -> '.join(_circle(below) or ['none'])}")
    print(f"circle of files: {' -> '.join(_circle(_graph(read)) or ['none'])}")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
