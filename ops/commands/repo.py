"""`gateway repo`: renders, fills in and checks the model repository that Triton serves."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ops.deployment.fields import FIELDS
from triton_repo import fill_template

if TYPE_CHECKING:
    from ops.deployment.check_findings import Finding


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = "Renders, fills and checks the model repository that Triton serves."
    commands = parser.add_subparsers(dest="repo_command", required=True, metavar="COMMAND")
    render = commands.add_parser(
        "render",
        help="write a repository for an engine",
        description="Writes a model repository from a description, in a YAML file or as options "
        "(which win), and from what the engine's config.json says. What the engine contradicts "
        "is refused.",
    )
    render.add_argument(
        "--repository",
        choices=("inflight_batcher_llm", "gpt", "llmapi"),
        default="inflight_batcher_llm",
        help="gpt: complete answers, one batch after another; it takes --release, --engine-dir, "
        "--tokenizer-dir and --parameter alone. llmapi: no engine; it takes --model, "
        "--tokenizer-dir, --decoupled and --parameter alone (default: inflight_batcher_llm)",
    )
    render.add_argument(
        "--model",
        metavar="DIR",
        help="with --repository llmapi: the Hugging Face folder as Triton sees it, or a model's "
        "name there",
    )
    render.add_argument("--description", type=Path, metavar="FILE", help="YAML with these names")
    goal = render.add_mutually_exclusive_group(required=True)
    goal.add_argument("--output", type=Path, metavar="DIR", help="where to write the repository")
    goal.add_argument("--print", action="store_true", help="show the parameters, write nothing")
    for name, text in FIELDS.items():
        render.add_argument(f"--{name.replace('_', '-')}", metavar="VALUE", help=text)
    render.add_argument(
        *("-p", "--parameter"),
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="any other template parameter",
    )
    render.add_argument(
        "--template-values",
        metavar="NAME:VALUE,NAME:VALUE",
        help="template parameters in the form of fill_template.py",
    )
    check = commands.add_parser(
        "check",
        help="find mistakes in a repository, one made elsewhere included",
        description="Says what will go wrong with a repository and how to mend it. Exit code 1 "
        "when there are errors.",
    )
    check.add_argument("repository", type=Path, metavar="DIR")
    for name in ("engine", "tokenizer"):
        check.add_argument(
            f"--{name}-dir",
            type=Path,
            metavar="DIR",
            help=f"the {name}, if Triton sees it elsewhere",
        )
    check.add_argument(
        "--adapter",
        type=Path,
        action="append",
        default=[],
        metavar="DIR",
        help="a LoRA adapter in PEFT form that a model of the llmapi repository is to serve; may "
        "be repeated",
    )
    check.add_argument(
        "--trtllm-version",
        metavar="VERSION",
        help="the TensorRT-LLM that will serve, or the tag of Triton's container, such as 25.08; "
        "names that it does not read are found (default: what built the engine)",
    )
    check.add_argument("--json", action="store_true", help="findings as JSON")
    fill = commands.add_parser(
        "fill",
        help="fill one config.pbtxt, as fill_template.py does",
        description=r"Escapes as in fill_template.py: \, is a comma and \\: a colon in a value.",
    )
    fill_template.add_arguments(fill)


def run(parsed: argparse.Namespace) -> int:
    """Run the subcommand `render`, `fill` or `check`, and return the exit code.

    The code is 1 for invalid options or files, and if a check of the repository finds an error.
    """
    if parsed.repo_command == "fill":
        return fill_template.run(parsed)
    if parsed.repo_command == "check":
        return _check(parsed)
    return _render(parsed)


def _render(parsed: argparse.Namespace) -> int:
    from ops.deployment import repository
    from ops.deployment.check import check
    from ops.deployment.gpt_repository import write_gpt
    from ops.deployment.llmapi_repository import write_llmapi

    try:
        overrides = _overrides(parsed)
        if parsed.repository == "llmapi":
            model = {} if parsed.model is None else {"model": parsed.model}
            return _render_without_description(parsed, overrides | model, write_llmapi)
        if parsed.model is not None:
            raise repository.DescriptionError("--model: only with --repository llmapi")
        if parsed.repository == "gpt":
            return _render_without_description(parsed, overrides, write_gpt)
        description = (
            repository.from_yaml(parsed.description, overrides)
            if parsed.description
            else repository.from_fields(overrides)
        )
        if parsed.print:
            for name, value in sorted(repository.template_parameters(description).items()):
                print(f"{name}: {json.dumps(value)}")
            return 0
        repository.write(description, parsed.output)
    except (repository.DescriptionError, fill_template.SubstitutionError, OSError) as error:
        for line in str(error).splitlines():
            print(f"gateway repo render: {line}", file=sys.stderr)
        return 1
    print(f"wrote {parsed.output}")
    return _show(
        check(parsed.output, description.local_engine_dir, description.local_tokenizer_dir)
    )


def _render_without_description(
    parsed: argparse.Namespace,
    fields: Mapping[str, Any],
    write: Callable[[Mapping[str, Any], Path], None],
) -> int:
    """Render and check a repository of the kind `llmapi` or `gpt`. Return the exit code.

    These kinds are not rendered from a description file. Raises DescriptionError, before anything
    is written, if --description or --print is given.
    """
    from ops.deployment.check import check
    from ops.deployment.repository import DescriptionError

    if parsed.description or parsed.print:
        raise DescriptionError(f"--description, --print: not with --repository {parsed.repository}")
    write(fields, parsed.output)
    print(f"wrote {parsed.output}")
    return _show(check(parsed.output))


def _overrides(parsed: argparse.Namespace) -> dict[str, Any]:
    """Return the fields of a `DeploymentDescription` whose values are given as options.

    These values take precedence over those in the file of --description.

    Raises SubstitutionError for malformed --template-values or --parameter.
    """
    fields = {name: getattr(parsed, name) for name in FIELDS if getattr(parsed, name) is not None}
    parameters = fill_template.parse_substitutions(parsed.template_values or "")
    for pair in parsed.parameter:
        name, equals, value = pair.partition("=")
        if not equals:
            raise fill_template.SubstitutionError(f"--parameter {pair}: allowed: NAME=VALUE")
        parameters[name] = value
    return fields | ({"parameters": parameters} if parameters else {})


def _check(parsed: argparse.Namespace) -> int:
    from ops.deployment.check import check
    from ops.deployment.check_findings import has_errors
    from ops.deployment.check_repository import RepositoryError
    from ops.deployment.llmapi_yaml import LLM_CONFIG_PATH
    from ops.deployment.release import ReleaseError

    try:
        findings = check(
            *(parsed.repository, parsed.engine_dir, parsed.tokenizer_dir),
            adapters=parsed.adapter,
            llm_config=os.environ.get(LLM_CONFIG_PATH),
            release=parsed.trtllm_version,
        )
    except (RepositoryError, ReleaseError, OSError) as error:
        print(f"gateway repo check: {error}", file=sys.stderr)
        return 1
    if parsed.json:
        print(json.dumps({"findings": [finding.json() for finding in findings]}, indent=2))
        return int(has_errors(findings))
    return _show(findings)


def _show(findings: Sequence[Finding]) -> int:
    from ops.deployment.check_findings import has_errors

    for finding in findings:
        location = f"{finding.model}: {finding.field}" if finding.model else finding.field
        print(f"{finding.severity:<8} {location}")
        print(f"         {finding.problem}")
        print(f"         fix: {finding.fix}")
    counts = [finding.severity for finding in findings]
    print(", ".join(f"{word}s: {counts.count(word)}" for word in ("error", "warning", "note")))
    return int(has_errors(findings))
