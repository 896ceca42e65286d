"""Rules that check the names of inputs that TensorRT-LLM renamed in some release.

A backend reads only the input names of its own release. If config.pbtxt has other names, Triton
accepts requests with these names, but the backend silently ignores their values.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from adapters.config_json import ConfigError
from adapters.engine_config import read_engine_config
from gateway.triton.names import RENAMED
from ops.deployment.check_findings import Finding
from ops.deployment.check_repository import LocalFolders, Repository, RepositoryModel
from ops.deployment.release import ReleaseError, read_sets
from triton_repo.render import core_inputs

RELEASE_OPTION = "--trtllm-version"


def other_names(name: str) -> tuple[str, ...]:
    """Return the input's names in other releases.

    The result is () for an input that was not renamed.
    """
    found = next((names for names in RENAMED if name in names), (name,))
    return tuple(other for other in found if other != name)


def name_findings(
    repository: Repository, places: LocalFolders, release: str | None
) -> Iterator[Finding]:
    """Yield a finding for each input in a config.pbtxt that the backend reads under another name.

    Args:
        repository: the repository to check.
        places: folders on this machine, to read the release from the engine's config.json.
        release: the TensorRT-LLM release that will serve the repository, or its container's tag.
            None selects the release that built the engine.

    Raises ReleaseError for an unknown `release`.
    """
    for model in [*repository.cores, *repository.bls_models]:
        assert model.file is not None
        if model.file.backend == "python":
            yield from _check_against_module(model)
        elif model.runs_engine:
            yield from _check_against_release(model, places, release)


def _check_against_release(
    model: RepositoryModel, places: LocalFolders, release: str | None
) -> Iterator[Finding]:
    """Yield a finding for each input of a model that its C++ backend reads under another name.

    The backend's input names depend on the TensorRT-LLM release that serves the model. If the
    release has two sets of input names, also yield a note.
    """
    source = f"{RELEASE_OPTION} {release}"
    if release is None:
        release = _engine_release(model, places)
        source = f"the engine is of TensorRT-LLM {release}"
    if release is None:
        return
    try:
        sets = read_sets(release)
    except ReleaseError:
        if source.startswith(RELEASE_OPTION):
            raise
        return
    read = frozenset().union(*(core_inputs(one) for one in sets))
    for name in (name for name in _list_declared(model) if name not in read):
        if other := next((other for other in other_names(name) if other in read), None):
            yield _unread(model, name, f"{source}, whose backend reads {other}", other)
    if len(sets) > 1:
        yield Finding(
            "note",
            model.name,
            "release",
            f"{source}: upstream's tag v0.19.0 reads random_seed and min_length, its container "
            "25.05 seed and min_tokens",
            f"say which one serves: {RELEASE_OPTION} 25.05, or render with --release 25.05 for it",
        )


def _check_against_module(model: RepositoryModel) -> Iterator[Finding]:
    """Yield a finding for each input of a Python model that has another name in the model's source.

    The source is the `.py` files in the model's highest version folder.
    """
    if not model.versions:
        return
    source = "\n".join(
        path.read_text(encoding="utf-8", errors="replace")
        for path in sorted(model.versions[-1].glob("*.py"))
    )
    strings = set(re.findall(r"""["'](\w+)["']""", source))
    for name in _list_declared(model):
        other = next((other for other in other_names(name) if other in strings), None)
        if name not in strings and other is not None:
            problem = f"{model.versions[-1].name}/model.py reads {other}"
            yield _unread(model, name, problem, other)


def _unread(model: RepositoryModel, name: str, problem: str, other: str) -> Finding:
    return Finding(
        "error",
        model.name,
        name,
        f"{problem}: requests that set {name} are answered as if they had not",
        f"declare {other} in place of {name} in every model of the repository, or take all files "
        "from one release: gateway repo render --release",
    )


def _list_declared(model: RepositoryModel) -> list[str]:
    assert model.file is not None
    return [name for names in RENAMED for name in names if name in model.file.inputs]


def _engine_release(model: RepositoryModel, places: LocalFolders) -> str | None:
    folder = places.engine(model)
    try:
        return None if folder is None else read_engine_config(folder).version
    except ConfigError:
        return None
