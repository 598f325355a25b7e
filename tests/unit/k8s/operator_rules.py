"""What KubeRay's operator refuses although the schema allows it, and what Baton needs beside.

Each rule is a function from a RayService to the sentences about it. The operator's rules are those
of version 1.7 that concern fields which our manifests use or may come to use.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import yaml

RayService = Mapping[str, Any]

MAX_NAME_LENGTH = 47
"""The operator appends to the name for the cluster's, and to that for the services'."""
MIN_TOKEN_AUTH_VERSION = (2, 52)
RAY_SWITCHES = ("RAY_SERVE_ENABLE_HA_PROXY", "RAY_SERVE_THROUGHPUT_OPTIMIZED")
POD_ADDRESSES = ("BATON_TRANSFER__HOST", "BATON_CHANNEL__HOST")
SECRET_VARIABLE = "BATON_SECRET"
REDIS_VARIABLES = frozenset({"RAY_REDIS_ADDRESS", "REDIS_PASSWORD", "REDIS_USERNAME"})
LOCAL_ONLY_VARIABLES = frozenset(
    {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "__RAY_WORKER_PROCESS_SETUP_HOOK_ENV_VAR"}
)
"""They keep a single host's instance on loopback: pods could not reach each other."""

_LABEL_NAME = r"[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?"
_LABEL_KEY = re.compile(rf"([a-z0-9]([a-z0-9.-]*[a-z0-9])?/)?{_LABEL_NAME}")


def problems(service: RayService) -> Iterator[str]:
    """A sentence for each rule that the RayService breaks."""
    for rule in (
        _name,
        _containers,
        _replica_bounds,
        _labels,
        _resources_said_once,
        _authentication,
        _upgrade,
        _head_service,
        _fault_tolerance,
        _autoscaler,
        _proxies,
        _environment,
        _pool_labels,
    ):
        yield from rule(service)


def groups(service: RayService) -> list[tuple[str, Mapping[str, Any]]]:
    """The head group and the worker groups, by name."""
    cluster = service["spec"]["rayClusterConfig"]
    workers = [(group["groupName"], group) for group in cluster.get("workerGroupSpecs", [])]
    return [("head", cluster["headGroupSpec"]), *workers]


def pod(group: Mapping[str, Any]) -> Mapping[str, Any]:
    """The pod's specification of a group."""
    spec: Mapping[str, Any] = group["template"]["spec"]
    return spec


def ray_container(group: Mapping[str, Any]) -> Mapping[str, Any]:
    """The container that runs Ray: the operator takes the first; empty where there is none."""
    return next(iter(pod(group).get("containers", [])), {})


def environment(group: Mapping[str, Any]) -> dict[str, Any]:
    """A group's variables: text, or where the text comes from."""
    return {
        entry["name"]: entry.get("value", entry.get("valueFrom"))
        for entry in ray_container(group).get("env", [])
    }


def serve_config(service: RayService) -> Any:
    """The Serve config inside the RayService, parsed."""
    return yaml.safe_load(service["spec"]["serveConfigV2"])


def _name(service: RayService) -> Iterator[str]:
    name = service["metadata"]["name"]
    if len(name) > MAX_NAME_LENGTH:
        yield f"metadata.name has {len(name)} characters; at most {MAX_NAME_LENGTH} fit"
    if not re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", name):
        yield f"metadata.name {name!r} is not a DNS-1035 label"


def _containers(service: RayService) -> Iterator[str]:
    names = [name for name, _ in groups(service)]
    yield from (
        f"two groups are called {name}" for name in {n for n in names if names.count(n) > 1}
    )
    for name, group in groups(service):
        if not pod(group).get("containers"):
            yield f"group {name} has no container"


def _replica_bounds(service: RayService) -> Iterator[str]:
    for name, group in groups(service)[1:]:
        low, high = group.get("minReplicas", 0), group.get("maxReplicas", 2**31 - 1)
        if not low <= group.get("replicas", 0) <= high:
            yield f"group {name}: replicas {group.get('replicas', 0)} is not in {low} to {high}"


def _labels(service: RayService) -> Iterator[str]:
    for name, group in groups(service):
        if "labels" in group.get("rayStartParams", {}):
            yield f"group {name}: labels belong beside rayStartParams, not into it"
        for key, value in group.get("labels", {}).items():
            if not _LABEL_KEY.fullmatch(key) or not re.fullmatch(rf"({_LABEL_NAME})?", value):
                yield f"group {name}: {key}: {value} is not a Kubernetes label"


def _resources_said_once(service: RayService) -> Iterator[str]:
    for name, group in groups(service):
        said = {"num-cpus", "num-gpus", "memory", "resources"} & set(
            group.get("rayStartParams", {})
        )
        if said and group.get("resources"):
            yield f"group {name}: resources and rayStartParams {sorted(said)} are both set"


def _authentication(service: RayService) -> Iterator[str]:
    cluster = service["spec"]["rayClusterConfig"]
    options = cluster.get("authOptions", {})
    if options.get("enableK8sTokenAuth"):
        yield "authOptions.enableK8sTokenAuth is refused for a RayService"
    if options.get("mode", "token") != "token":
        yield "authOptions.mode: without token, whoever reaches the dashboard may run code"
    version = re.match(r"(\d+)\.(\d+)\.\d+", cluster.get("rayVersion", ""))
    if not version or (int(version[1]), int(version[2])) < MIN_TOKEN_AUTH_VERSION:
        yield "rayVersion must be 2.52.0 or later for token authentication"


def _upgrade(service: RayService) -> Iterator[str]:
    spec = service["spec"]
    strategy = spec.get("upgradeStrategy", {})
    kind = strategy.get("type", "NewCluster")
    if kind not in {"NewCluster", "NewClusterWithIncrementalUpgrade", "None"}:
        yield f"upgradeStrategy.type {kind} does not exist"
    if kind == "NewClusterWithIncrementalUpgrade":
        if not spec["rayClusterConfig"].get("enableInTreeAutoscaling"):
            yield "an incremental upgrade needs enableInTreeAutoscaling"
        if "clusterUpgradeOptions" not in strategy:
            yield "an incremental upgrade needs clusterUpgradeOptions"
    if spec.get("rayClusterDeletionDelaySeconds", 0) < 0:
        yield "rayClusterDeletionDelaySeconds is below 0"


def _head_service(service: RayService) -> Iterator[str]:
    head = service["spec"]["rayClusterConfig"]["headGroupSpec"]
    if head.get("headService", {}).get("metadata", {}).get("name"):
        yield "headGroupSpec.headService must not have a name"


def _fault_tolerance(service: RayService) -> Iterator[str]:
    cluster = service["spec"]["rayClusterConfig"]
    said = REDIS_VARIABLES & set(environment(cluster["headGroupSpec"]))
    if said:
        yield f"{sorted(said)} are set by gcsFaultToleranceOptions only"
    if cluster.get("gcsFaultToleranceOptions", {}).get("externalStorageNamespace"):
        yield "externalStorageNamespace makes the old and the new cluster of an upgrade share state"


def _autoscaler(service: RayService) -> Iterator[str]:
    cluster = service["spec"]["rayClusterConfig"]
    version = cluster.get("autoscalerOptions", {}).get("version")
    variable = environment(cluster["headGroupSpec"]).get("RAY_enable_autoscaler_v2")
    if variable and (version or not cluster.get("enableInTreeAutoscaling")):
        yield "RAY_enable_autoscaler_v2 is set; say autoscalerOptions.version instead"
    if not (cluster.get("enableInTreeAutoscaling") and version == "v2"):
        return
    for name, group in groups(service):
        if pod(group).get("restartPolicy", "Never") != "Never":
            yield f"group {name}: restartPolicy must be Never or unset with autoscaler v2"


def _proxies(service: RayService) -> Iterator[str]:
    location = serve_config(service).get("proxy_location", "EveryNode")
    if location != "EveryNode":
        yield f"proxy_location is {location}: worker pods would never become ready"


def _environment(service: RayService) -> Iterator[str]:
    for name, group in groups(service):
        variables = environment(group)
        for switch in RAY_SWITCHES:
            if variables.get(switch) != "1":
                yield f"group {name}: {switch} is not 1; all processes must agree"
        for variable in POD_ADDRESSES:
            if variables.get(variable) != {"fieldRef": {"fieldPath": "status.podIP"}}:
                yield f"group {name}: {variable} is not the pod's address"
        if not _is_required_secret(variables.get(SECRET_VARIABLE)):
            yield f"group {name}: {SECRET_VARIABLE} is not from a Secret that must exist"
        for variable in sorted(LOCAL_ONLY_VARIABLES & set(variables)):
            yield f"group {name}: {variable} would keep the pod's servers on loopback"


def _is_required_secret(source: Any) -> bool:
    """Never a text that anybody who reads the manifest reads too, and never left out."""
    if not isinstance(source, Mapping) or source.keys() != {"secretKeyRef"}:
        return False
    return source["secretKeyRef"].keys() == {"name", "key"}


def _pool_labels(service: RayService) -> Iterator[str]:
    """Replicas whose selector no group satisfies would wait for ever."""
    offered = [group.get("labels", {}) for _, group in groups(service)]
    for application in serve_config(service)["applications"]:
        for deployment in application.get("deployments", []):
            wanted = deployment.get("ray_actor_options", {}).get("label_selector", {})
            if not any(wanted.items() <= labels.items() for labels in offered):
                yield f"{deployment['name']}: no group has the labels {wanted}"
