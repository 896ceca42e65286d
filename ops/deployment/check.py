"""Checks of a model repository. The repository may have been made by another tool."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ops.deployment.check_findings import Finding, by_severity
from ops.deployment.check_llmapi import llmapi_findings
from ops.deployment.check_names import name_findings
from ops.deployment.check_repository import LocalFolders, RepositoryError, read_repository
from ops.deployment.check_serving import serving_findings
from ops.deployment.check_structure import structure_findings
from ops.deployment.check_values import value_findings


def check(
    path: Path,
    engine_dir: Path | None = None,
    tokenizer_dir: Path | None = None,
    *,
    adapters: Sequence[Path] = (),
    llm_config: str | None = None,
    release: str | None = None,
) -> list[Finding]:
    """Return the findings on the repository in `path`, errors first.

    Args:
        path: the repository.
        engine_dir: the engine's path on this machine; None if it is the same as for Triton.
        tokenizer_dir: the tokenizer's path on this machine; None if it is the same as for Triton.
        adapters: PEFT folders that an llmapi model must be able to serve.
        llm_config: value of LLM_CONFIG_PATH in Triton's environment, for the llmapi repository.
        release: the TensorRT-LLM release that will serve the repository, or its container's tag.
            None selects the release that built the engine.

    Raises:
        RepositoryError: `path` has no models, or `adapters` are given and no model reads adapters
            from a disk.
        ReleaseError: `release` is unknown.
    """
    repository = read_repository(path)
    if adapters and not repository.llmapi_models:
        raise RepositoryError(
            "--adapter: only for a model of the llmapi repository; for others the gateway checks "
            "an adapter when it is added"
        )
    places = LocalFolders(engine_dir, tokenizer_dir)
    return by_severity(
        [
            *structure_findings(repository),
            *serving_findings(repository, places),
            *value_findings(repository),
            *name_findings(repository, places, release),
            *llmapi_findings(repository, places, adapters, llm_config),
        ]
    )
