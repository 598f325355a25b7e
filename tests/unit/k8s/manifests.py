"""The files under k8s/ as the tests read them, and everything that is wrong with a RayService."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from configs.schema import Settings
from deployments.cluster.errors import ServeConfigError
from deployments.cluster.serve_config import parse_serve_config
from tests.unit.k8s import crd, operator_rules

REPOSITORY = Path(__file__).resolve().parents[3]
K8S = REPOSITORY / "k8s"
CRD_FILE = "kuberay/ray.io_rayservices.v1.7.0.yaml"

Document = Mapping[str, Any]


def data_folder() -> Path:
    """Where shared test data is: BATON_DATA, or beside the repository."""
    return Path(os.environ.get("BATON_DATA") or REPOSITORY / "../shared/data")


def ray_service_schema() -> crd.Schema | None:
    """The schema of KubeRay's RayService; None where the test data is absent."""
    path = data_folder() / CRD_FILE
    if not path.exists():
        return None
    # A megabyte of YAML takes the pure Python loader 8 s.
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    return crd.schema_of(yaml.load(path.read_bytes(), loader), "v1")


def documents() -> list[tuple[Path, Document]]:
    """Every YAML document under k8s/ with its file."""
    return [
        (path, document)
        for path in sorted(K8S.rglob("*.y*ml"))
        for document in yaml.safe_load_all(path.read_text(encoding="utf-8"))
    ]


def of_kind(kind: str) -> dict[str, Document]:
    """The documents of one kind, by file below k8s/ and name."""
    return {
        f"{path.relative_to(K8S)}:{document['metadata']['name']}": document
        for path, document in documents()
        if document["kind"] == kind
    }


def settings_of(service: Document) -> Settings:
    """Baton's settings in a RayService; ValidationError if they are not ours."""
    (application,) = operator_rules.serve_config(service)["applications"]
    return Settings.model_validate(application["args"]["settings"])


def schema_problems(service: Document, schema: crd.Schema) -> list[str]:
    """What the API server would refuse, or drop without a word."""
    return list(crd.problems(service, schema))


def meaning_problems(service: Document) -> list[str]:
    """What Serve, the operator or Baton would refuse in a document of the right shape."""
    return [
        *_serve_problems(service),
        *operator_rules.problems(service),
        *_settings_problems(service),
    ]


def _serve_problems(service: Document) -> Iterator[str]:
    try:
        parse_serve_config(operator_rules.serve_config(service))
    except ServeConfigError as error:
        yield str(error)


def _settings_problems(service: Document) -> Iterator[str]:
    for application in operator_rules.serve_config(service)["applications"]:
        arguments = application.get("args", {})
        yield from (
            f"args.{key}: not an argument of build" for key in arguments.keys() - {"settings"}
        )
        try:
            Settings.model_validate(arguments.get("settings", {}))
        except ValidationError as error:
            for detail in error.errors(include_url=False):
                yield f"settings.{'.'.join(map(str, detail['loc']))}: {detail['msg']}"
