"""Nothing but Baton's own pods reaches a port that the NetworkPolicy does not name."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import pytest

from tests.unit.k8s import crd, manifests, operator_rules

OURS = {"app.kubernetes.io/part-of": "baton"}
OPERATOR = {"app.kubernetes.io/component": "kuberay-operator"}
KV_PORT = 43121  # any that the system may choose
DASHBOARD_PORT, HTTP_PORT, HAPROXY_METRICS_PORT = 8265, 8000, 9101


@pytest.fixture
def policy() -> dict[str, Any]:
    return copy.deepcopy(dict(manifests.of_kind("NetworkPolicy")["base/networkpolicy.yaml:baton"]))


def selects(selector: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    """Whether labels match; expressions are not used in our policies and not understood here."""
    assert selector.keys() <= {"matchLabels"}
    wanted: Mapping[str, str] = selector.get("matchLabels", {})
    return wanted.items() <= labels.items()


def admits(
    policy: Mapping[str, Any], port: int, pod: Mapping[str, str], namespace: str = "default"
) -> bool:
    """Whether a pod may open a TCP connection to the port of a pod that the policy protects."""

    def is_source(peer: Mapping[str, Any]) -> bool:
        assert peer.keys() <= {"podSelector", "namespaceSelector"}
        names = {"kubernetes.io/metadata.name": namespace}
        in_namespace = (
            selects(peer["namespaceSelector"], names)
            if "namespaceSelector" in peer
            else namespace == "default"  # the policy's own
        )
        return in_namespace and selects(peer.get("podSelector", {}), pod)

    def opens(rule: Mapping[str, Any]) -> bool:
        return "ports" not in rule or any(entry["port"] == port for entry in rule["ports"])

    return any(
        opens(rule) and ("from" not in rule or any(map(is_source, rule["from"])))
        for rule in policy["spec"]["ingress"]
    )


def test_policy_covers_every_pod_of_the_ray_service(policy):
    (service,) = manifests.of_kind("RayService").values()
    selector = policy["spec"]["podSelector"]

    assert policy["spec"]["policyTypes"] == ["Ingress"]
    for name, group in operator_rules.groups(service):
        assert selects(selector, group["template"]["metadata"]["labels"]), name


@pytest.mark.parametrize("port", [KV_PORT, DASHBOARD_PORT, HTTP_PORT, 6379])
def test_our_pods_reach_each_other_at_any_port(port, policy):
    assert admits(policy, port, OURS)


@pytest.mark.parametrize("port", [KV_PORT, DASHBOARD_PORT, HAPROXY_METRICS_PORT, 6379, 10001])
@pytest.mark.parametrize(
    ("pod", "namespace"),
    [({}, "default"), ({"app": "x"}, "default"), (OURS, "other"), (OPERATOR, "default")],
)
def test_other_pods_reach_no_inner_port(port, pod, namespace, policy):
    assert not admits(policy, port, pod, namespace)


def test_clients_of_the_namespace_reach_the_http_api_only(policy):
    assert admits(policy, HTTP_PORT, {"app": "client"})
    assert not admits(policy, HTTP_PORT, {"app": "client"}, "other")


def test_operator_reaches_dashboard_and_proxies_but_no_kv(policy):
    assert admits(policy, DASHBOARD_PORT, OPERATOR, "kuberay-system")
    assert admits(policy, HTTP_PORT, OPERATOR, "kuberay-system")
    assert not admits(policy, KV_PORT, OPERATOR, "kuberay-system")


def test_a_rule_without_a_source_is_noticed(policy):
    del policy["spec"]["ingress"][0]["from"]

    assert admits(policy, KV_PORT, {"app": "x"}, "other")


@pytest.mark.parametrize("typo", [None, "form", "prots"])
def test_rules_have_the_shape_of_kubernetes(typo, policy):
    """KubeRay's CRD embeds the schema of a policy's rules."""
    schema = manifests.ray_service_schema()
    if schema is None:
        pytest.skip(f"{manifests.CRD_FILE} is not in {manifests.data_folder()}; set BATON_DATA")
    cluster = schema["properties"]["spec"]["properties"]["rayClusterConfig"]["properties"]
    rules = cluster["networkPolicy"]["properties"]["head"]["properties"]["ingressRules"]
    if typo:
        policy["spec"]["ingress"][0][typo] = []

    found = list(crd.problems(policy["spec"]["ingress"], rules))

    assert [typo in text for text in found] == ([True] if typo else [])
