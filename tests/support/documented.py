"""Conformance of a server to its OpenAPI document, by schemathesis.

The import takes a second, and each process collects all tests: import this where it is used.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx
import requests
import schemathesis
from hypothesis import HealthCheck
from schemathesis import checks
from schemathesis.config import (
    GenerationConfig,
    NotAServerErrorConfig,
    OutputConfig,
    ProjectConfig,
    ProjectsConfig,
    SanitizationConfig,
    SchemathesisConfig,
)
from schemathesis.generation.hypothesis.builder import (
    HypothesisTestConfig,
    HypothesisTestMode,
    create_test,
)

from tests.support.examples import scale_examples

# As in `Schema.parametrize`, which would generate thousands of cases during collection.
_MODES = [HypothesisTestMode.EXAMPLES, HypothesisTestMode.FUZZING, HypothesisTestMode.COVERAGE]
_EXCLUDED = [
    # A request may fit the schema and still be refused, such as for an unknown token.
    checks.positive_data_acceptance,
    # GET on /v1/adapters/{name}/verify is GET on the adapter "{name}/verify": names have slashes.
    checks.allow_header_conformance,
]


class Documented:
    """The checks of one document."""

    def __init__(self, document: dict[str, Any]) -> None:
        project = ProjectConfig(generation=GenerationConfig(with_security_parameters=False))
        # 503 is a documented answer: the engine is not ready or too busy now.
        project.checks.not_a_server_error = NotAServerErrorConfig(
            expected_statuses=["2xx", "3xx", "4xx", "503"]
        )
        # Otherwise every value with "token" in its name is hidden in reports of failed requests.
        output = OutputConfig(sanitization=SanitizationConfig(enabled=False))
        config = SchemathesisConfig(projects=ProjectsConfig(default=project), output=output)
        self._document = document
        self._schema: Any = schemathesis.openapi.from_dict(document, config=config)

    def validate(self) -> None:
        """Check that it is an OpenAPI document."""
        self._schema.validate()

    def check(self, operation: str, names: dict[str, str], response: httpx.Response) -> None:
        """Check one answer to `operation`, such as "POST /v1/models", with these `names` in its
        path.
        """
        method, path = operation.split()
        case: schemathesis.Case = self._schema[path][method].Case(path_parameters=names)
        case.validate_response(
            response,
            checks=[
                checks.status_code_conformance,
                checks.content_type_conformance,
                checks.response_headers_conformance,
                checks.response_schema_conformance,
            ],
        )

    def ask(
        self,
        operation: str,
        admin: httpx.Client,
        prepare: Callable[[schemathesis.Case], None],
        *,
        within_s: float,
    ) -> None:
        """Send requests that fit the document and others, each modified by `prepare`."""
        method, path = operation.split()
        # Otherwise each of thousands of requests reads proxy variables and opens a connection.
        session = requests.Session()
        session.trust_env = False

        @scale_examples(
            0.4,
            derandomize=True,
            database=None,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
        )
        def is_answered_as_documented(case: schemathesis.Case) -> None:
            prepare(case)
            response = case.call_and_validate(
                base_url=str(admin.base_url).rstrip("/"),
                session=session,
                headers={"Authorization": admin.headers["authorization"]},
                excluded_checks=_EXCLUDED,
                timeout=within_s,
            )
            # schemathesis itself accepts some: 415 for a content type that it generated on purpose.
            documented = self._document["paths"][case.path][case.operation.method]["responses"]
            assert str(response.status_code) in documented or response.status_code == 405

        with session:
            create_test(
                operation=self._schema[path][method],
                test_func=is_answered_as_documented,
                config=HypothesisTestConfig(project=self._schema.config, modes=_MODES),
            )()
