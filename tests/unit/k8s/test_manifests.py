"""The RayServices that we ship are accepted by the CRD, the operator, Serve and our own settings.

Beside each check stand planted mistakes that it must report: a validator that reports nothing
looks the same as a manifest without a fault.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import reduce
from typing import Any

import pytest
import yaml

from tests.unit.k8s import crd, manifests, operator_rules

RAY_SERVICES = manifests.of_kind("RayService")
Change = Callable[[dict[str, Any]], None]


@pytest.fixture(scope="module")
def ray_service_schema() -> crd.Schema:
    schema = manifests.ray_service_schema()
    if schema is None:
        pytest.skip(
            f"{manifests.CRD_FILE} is not in {manifests.data_folder()}; set BATON_DATA to the "
            "folder of test data"
        )
    return schema


@pytest.fixture
def service() -> dict[str, Any]:
    """The split's manifest, to be changed."""
    return copy.deepcopy(dict(RAY_SERVICES["base/rayservice.yaml:baton"]))


def at(*path: str | int, value: Any) -> Change:
    """Set one value deep in a manifest."""

    def change(document: dict[str, Any]) -> None:
        start: Any = document
        reduce(lambda node, key: node[key], path[:-1], start)[path[-1]] = value

    return change


def in_cluster(*path: str | int, value: Any) -> Change:
    return at("spec", "rayClusterConfig", *path, value=value)


def in_serve(*path: str | int, value: Any) -> Change:
    """The same in the Serve config, which is text inside the manifest."""

    def change(document: dict[str, Any]) -> None:
        config = yaml.safe_load(document["spec"]["serveConfigV2"])
        at(*path, value=value)(config)
        document["spec"]["serveConfigV2"] = yaml.safe_dump(config)

    return change


def in_settings(*path: str, value: Any) -> Change:
    return in_serve("applications", 0, "args", "settings", *path, value=value)


def test_there_is_a_ray_service_to_check():
    assert "base/rayservice.yaml:baton" in RAY_SERVICES


@pytest.mark.parametrize("name", RAY_SERVICES)
def test_ray_service_satisfies_the_crd(name, ray_service_schema):
    assert manifests.schema_problems(RAY_SERVICES[name], ray_service_schema) == []


@pytest.mark.parametrize("name", RAY_SERVICES)
def test_ray_service_satisfies_serve_the_operator_and_our_settings(name):
    assert manifests.meaning_problems(RAY_SERVICES[name]) == []


HEAD = ("headGroupSpec", "template", "spec")
PREFILL = ("workerGroupSpecs", 0)
PREFILL_CONTAINER = (*PREFILL, "template", "spec", "containers", 0)


@pytest.mark.parametrize(
    ("mistake", "report"),
    [
        (at("spec", "serveConfigV3", value=""), "'serveConfigV3' was unexpected"),
        (at("spec", "serveConfigV2", value={"applications": []}), "is not of type 'string'"),
        (in_cluster("enableInTreeAutoscalng", value=True), "'enableInTreeAutoscalng'"),
        (in_cluster(*PREFILL, "replicas", value="2"), "is not of type 'integer'"),
        (in_cluster(*PREFILL, "rayStartParams", value={"num-cpus": 4}), "of type 'string'"),
        (in_cluster(*PREFILL_CONTAINER, "resources", "limits", "memory", value="4 GB"), "match"),
        (in_cluster(*PREFILL_CONTAINER, "livenesProbe", value={}), "'livenesProbe'"),
        (in_cluster(*HEAD, "containers", 0, "securityContext", "privilegd", value=True), "privil"),
        (in_cluster(*HEAD, "containers", 0, "ports", 0, value={"name": "x"}), "containerPort"),
        (in_cluster("authOptions", "mode", value="tokens"), "is not one of"),
        (in_cluster(*PREFILL, value={"replicas": 1}), "'groupName' is a required property"),
    ],
)
def test_crd_check_reports(mistake: Change, report: str, service, ray_service_schema):
    mistake(service)

    assert any(report in text for text in manifests.schema_problems(service, ray_service_schema))


@pytest.mark.parametrize(
    ("mistake", "report"),
    [
        (in_serve("proxy_locaton", value="EveryNode"), "unknown key proxy_locaton"),
        (in_serve("applications", 0, "import_pth", value="x:y"), "import_pth"),
        (in_serve("applications", 0, "deployments", 0, "max_ongoing_request", value=9), "ongoing"),
        (
            in_serve("applications", 0, "deployments", 0, "ray_actor_options", "num_cpu", value=1),
            "did you mean num_cpus?",
        ),
        (in_serve("http_options", "port", value="eight"), "http_options.port"),
        (in_serve("applications", 0, "import_path", value=":build"), "import_path"),
        (in_serve("applications", 0, "args", "preset", value="local"), "args.preset"),
        (in_settings("prefil", value={}), "settings.prefil: Extra inputs"),
        (in_settings("decode", "engine", "treads", value=3), "settings.decode.engine.treads"),
        (in_settings("decode", "replicas", value="2"), "settings.decode.replicas"),
        (in_settings("decode", "engine", "step_tokens", value=1), "must be at least max_sequences"),
        (in_serve("proxy_location", value="HeadOnly"), "would never become ready"),
        (
            in_serve(
                "applications", 0, "deployments", 0, "ray_actor_options", "label_selector",
                value={"baton/pool": "front"},
            ),
            "no group has the labels",
        ),
    ],
)  # fmt: skip
def test_serve_and_settings_check_reports(mistake: Change, report: str, service):
    mistake(service)

    assert any(report in text for text in manifests.meaning_problems(service))


@pytest.mark.parametrize(
    ("mistake", "report"),
    [
        (at("metadata", "name", value="b" * 48), "at most 47 fit"),
        (at("metadata", "name", value="2baton"), "not a DNS-1035 label"),
        (in_cluster(*HEAD, "containers", value=[]), "group head has no container"),
        (in_cluster(*PREFILL, "groupName", value="decode"), "two groups are called decode"),
        (in_cluster(*PREFILL, "replicas", value=3), "replicas 3 is not in 2 to 2"),
        (in_cluster(*PREFILL, "rayStartParams", value={"labels": "a=b"}), "beside rayStartParams"),
        (in_cluster(*PREFILL, "labels", value={"baton/pool": "pre fill"}), "Kubernetes label"),
        (in_cluster("headGroupSpec", "resources", value={"CPU": "0"}), "are both set"),
        (in_cluster("authOptions", value={"enableK8sTokenAuth": True}), "enableK8sTokenAuth"),
        (in_cluster("authOptions", value={"mode": "disabled"}), "may run code"),
        (in_cluster("rayVersion", value="2.51.0"), "2.52.0 or later"),
        (at("spec", "upgradeStrategy", "type", value="Rolling"), "Rolling does not exist"),
        (
            at("spec", "upgradeStrategy", "type", value="NewClusterWithIncrementalUpgrade"),
            "needs clusterUpgradeOptions",
        ),
        (at("spec", "rayClusterDeletionDelaySeconds", value=-1), "below 0"),
        (
            in_cluster("headGroupSpec", "headService", value={"metadata": {"name": "x"}}),
            "must not have a name",
        ),
        (
            in_cluster(*HEAD, "containers", 0, "env", 0, value={"name": "REDIS_PASSWORD"}),
            "gcsFaultToleranceOptions only",
        ),
        (
            in_cluster("gcsFaultToleranceOptions", value={"externalStorageNamespace": "x"}),
            "share state",
        ),
        (
            in_cluster(*HEAD, "containers", 0, "env", 0, value={
                "name": "RAY_enable_autoscaler_v2", "value": "1",
            }),
            "autoscalerOptions.version instead",
        ),
        (in_cluster(*PREFILL_CONTAINER, "env", 0, "value", value="0"), "all processes must agree"),
        (in_cluster(*PREFILL_CONTAINER, "env", value=[]), "is not the pod's address"),
        (in_cluster(*PREFILL_CONTAINER, "env", value=[]), "is not from a Secret that must exist"),
        (
            in_cluster(*PREFILL_CONTAINER, "env", 8, value={
                "name": "BATON_SECRET", "value": "x" * 64,
            }),
            "is not from a Secret that must exist",
        ),
        (
            in_cluster(*PREFILL_CONTAINER, "env", 8, "valueFrom", "secretKeyRef", "optional",
                       value=True),
            "is not from a Secret that must exist",
        ),
        (
            in_cluster(*PREFILL_CONTAINER, "env", 0, value={
                "name": "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "value": "0",
            }),
            "on loopback",
        ),
    ],
)  # fmt: skip
def test_operator_rules_report(mistake: Change, report: str, service):
    mistake(service)

    assert any(report in text for text in operator_rules.problems(service))


def test_autoscaler_v2_with_restarting_pods_is_reported(service):
    in_cluster("enableInTreeAutoscaling", value=True)(service)
    in_cluster("autoscalerOptions", value={"version": "v2"})(service)
    in_cluster(*PREFILL, "template", "spec", "restartPolicy", value="Always")(service)

    assert "group prefill: restartPolicy must be Never or unset with autoscaler v2" in list(
        operator_rules.problems(service)
    )


def test_schema_defaults_are_filled_in_before_required_is_checked(service, ray_service_schema):
    group = service["spec"]["rayClusterConfig"]["workerGroupSpecs"][0]
    del group["minReplicas"], group["maxReplicas"]

    assert manifests.schema_problems(service, ray_service_schema) == []
    assert "minReplicas" not in group
