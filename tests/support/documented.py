"""Checks with schemathesis that a server conforms to its OpenAPI document.

Importing schemathesis takes a second, and each pytest worker collects all tests, so import this
module only inside tests.
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

# The modes of `Schema.parametrize`, which itself would generate thousands of cases while pytest
# collects.
_MODES = [HypothesisTestMode.EXAMPLES, HypothesisTestMode.FUZZING, HypothesisTestMode.COVERAGE]
_EXCLUDED = [
    # A request may fit the schema and still be refused, for example for an unknown token.
    checks.positive_data_acceptance,
    # GET on /v1/adapters/{name}/verify means the adapter "{name}/verify": names may have slashes.
    checks.allow_header_conformance,
]


class Documented:
    """The checks against one OpenAPI document."""

    def __init__(self, document: dict[str, Any]) -> None:
        project = ProjectConfig(generation=GenerationConfig(with_security_parameters=False))
        # 503 is a documented answer: the engine is not ready, or is too busy.
        project.checks.not_a_server_error = NotAServerErrorConfig(
            expected_statuses=["2xx", "3xx", "4xx", "503"]
        )
        # Otherwise reports hide each value with "token" in its name.
        output = OutputConfig(sanitization=SanitizationConfig(enabled=False))
        config = SchemathesisConfig(projects=ProjectsConfig(default=project), output=output)
        self._document = document
        self._schema: Any = schemathesis.openapi.from_dict(document, config=config)

    def validate(self) -> None:
        """Check that the document is valid OpenAPI."""
        self._schema.validate()

    def check(self, operation: str, names: dict[str, str], response: httpx.Response) -> None:
        """Check one answer to `operation`, such as "POST /v1/models".

        `names` are the values of the path's parameters.
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
        """Send valid and invalid requests for the document, each modified by `prepare`."""
        method, path = operation.split()
        # Otherwise each request reads proxy variables and opens a new connection.
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
            # schemathesis accepts some undocumented statuses, such as 415 for a wrong content type.
            documented = self._document["paths"][case.path][case.operation.method]["responses"]
            assert str(response.status_code) in documented or response.status_code == 405

        with session:
            create_test(
                operation=self._schema[path][method],
                test_func=is_answered_as_documented,
                config=HypothesisTestConfig(project=self._schema.config, modes=_MODES),
            )()
