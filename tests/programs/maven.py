"""Programs of Maven Central packages, run by a JVM."""

from __future__ import annotations

import re
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.programs.engine.script import Call, Script
from tests.programs.program import Program, Workspace
from tests.programs.registry_client import QUERY_LIMIT_S, run_client

_SOURCES = Path(__file__).with_name("java")
_CENTRAL = "https://repo.maven.apache.org/maven2"
_POM = """\
<project xmlns="http://maven.apache.org/POM/4.0.0">
  <modelVersion>4.0.0</modelVersion>
  <groupId>programs</groupId>
  <artifactId>program</artifactId>
  <version>1</version>
  <dependencyManagement><dependencies>
    {managed}
  </dependencies></dependencyManagement>
  <dependencies>
    {dependencies}
  </dependencies>
</project>
"""
_DEPENDENCY = (
    "<dependency><groupId>{group}</groupId><artifactId>{artifact}</artifactId>"
    "<version>{version}</version>{scope}</dependency>"
)
_BILL_OF_MATERIALS = "<type>pom</type><scope>import</scope>"
_COPY = "org.apache.maven.plugins:maven-dependency-plugin:3.8.1:copy-dependencies"


class MavenProgram(Program):
    """A Java class for packages `GROUP:ARTIFACT`, in the folder java.

    The class is called with the gateway's URL and the model, and prints a line per answer.
    """

    registry = "maven"
    tools = ("javac", "mvn")
    well_known = "junit:junit"
    main_class: str
    expected: Sequence[str]
    """Lines of the output. {answer} stands for the scripted engine's answer."""

    def install(self, folder: Path, versions: Mapping[str, str]) -> None:
        (folder / "pom.xml").write_text(_pom(versions), encoding="utf-8")
        copy = ["mvn", "--quiet", "--batch-mode", _COPY, f"-DoutputDirectory={folder / 'lib'}"]
        run_client(copy, folder=folder)
        # `-parameters` keeps the names of a tool's parameters for frameworks.
        javac = ["javac", "-parameters", "-cp", folder / "lib" / "*", "-d", folder / "classes"]
        source = _SOURCES / f"{self.main_class}.java"
        run_client([*javac, source])

    def newest_version(self, package: str) -> str:
        path = package.replace(".", "/").replace(":", "/")
        url = f"{_CENTRAL}/{path}/maven-metadata.xml"
        with urllib.request.urlopen(url, timeout=QUERY_LIMIT_S) as answer:
            found = re.findall(r"<version>([0-9.]+)</version>", answer.read().decode())
        return max(found, key=lambda version: [int(part) for part in version.split(".")])

    def prepare(self, workspace: Workspace) -> Script:
        note = workspace.write_note()
        return Script(calls=[Call("(?i)read_?note", {"name": str(note)})])

    def command(self, workspace: Workspace) -> Sequence[str | Path]:
        folders = [workspace.installed / "classes", workspace.installed / "lib" / "*"]
        java = ["java", "-cp", ":".join(map(str, folders)), self.main_class]
        return [*java, workspace.url, workspace.model]

    def judge(self, workspace: Workspace, output: str) -> list[str]:
        expected = [line.format(answer=workspace.answer) for line in self.expected]
        printed = [line for line in output.splitlines() if line in expected]
        return [] if printed == expected else [f"printed {printed}, not {expected}"]


def _pom(versions: Mapping[str, str]) -> str:
    """Return a pom.xml with the packages. Packages named `*-dependencies` are imported as BOMs."""
    managed, dependencies = [], []
    for package, version in versions.items():
        group, artifact = package.split(":")
        fields = {"group": group, "artifact": artifact, "version": version}
        if artifact.endswith("-dependencies"):
            managed.append(_DEPENDENCY.format(**fields, scope=_BILL_OF_MATERIALS))
        else:
            dependencies.append(_DEPENDENCY.format(**fields, scope=""))
    return _POM.format(managed="\n    ".join(managed), dependencies="\n    ".join(dependencies))


class OpenaiJava(MavenProgram):
    name = "openai-java"
    packages = ("com.openai:openai-java",)
    main_class = "OpenAi"
    expected = (*["{answer}"] * 3, "sum 1")


class LangChain4j(MavenProgram):
    name = "langchain4j"
    packages = tuple(
        f"dev.langchain4j:langchain4j{part}" for part in ("", "-open-ai", "-anthropic")
    )
    main_class = "LangChain4j"
    expected = (*["{answer}"] * 4, "sum 1")


class SpringAi(MavenProgram):
    name = "spring-ai"
    packages = (
        "org.springframework.ai:spring-ai-openai",
        "org.springframework.ai:spring-ai-client-chat",
        "org.springframework.boot:spring-boot-dependencies",
    )
    main_class = "SpringAi"
    expected = ("{answer}",) * 2
