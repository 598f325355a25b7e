"""What the manifest says in several places agrees: pods, replicas, pools, image, image's user."""

from __future__ import annotations

import re
import tomllib
from importlib import metadata
from typing import Any

import pytest

from tests.unit.k8s import manifests, operator_rules
from workers.planning import ModelFacts, WorkerPlan, plan
from workers.runner_choice import Architecture

SERVICE = manifests.of_kind("RayService")["base/rayservice.yaml:baton"]
SETTINGS = manifests.settings_of(SERVICE)
GROUPS = dict(operator_rules.groups(SERVICE))
DOCKERFILE = (manifests.K8S / "Dockerfile").read_text(encoding="utf-8")
PROJECT = tomllib.loads((manifests.REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))

DEFAULT_MODEL = ModelFacts(
    digest="any",
    context_length=8192,
    num_layers=30,
    num_kv_heads=3,
    head_dim=64,
    dtype="fp32",
    element_bytes=4,
    vocab_size=49_152,
    architecture=Architecture(model_type="llama"),
    weight_bytes=4 * 134_515_008,
)
RAY_AND_TORCH_BYTES = 1 << 30
"""An allowance for a raylet, its agents, a proxy and the replicas' interpreters with torch."""
FRONT_BYTES = 300 << 20


def deployments() -> dict[str, dict[str, Any]]:
    (application,) = operator_rules.serve_config(SERVICE)["applications"]
    return {deployment["name"]: deployment for deployment in application["deployments"]}


def limit(group: str, resource: str) -> int:
    """CPUs or bytes."""
    text = operator_rules.ray_container(GROUPS[group])["resources"]["limits"][resource]
    quantity = re.fullmatch(r"(\d+)(Gi)?", text)
    assert quantity is not None, text
    return int(quantity[1]) * (2**30 if quantity[2] else 1)


@pytest.fixture
def sizes() -> dict[str, WorkerPlan]:
    """The plan of each pool by role."""
    planned = plan(SETTINGS, DEFAULT_MODEL, cores=limit("decode", "cpu"))
    assert planned.ok, planned.checks
    return {worker.role: worker for worker in planned.workers}


@pytest.mark.parametrize(("group", "others"), [("prefill", 0), ("decode", FRONT_BYTES)])
def test_each_pod_has_memory_for_its_pool_and_weights(group, others, sizes):
    needed = sizes[group].pool_bytes + DEFAULT_MODEL.weight_bytes + RAY_AND_TORCH_BYTES + others

    assert needed <= limit(group, "memory")


@pytest.mark.parametrize(
    ("group", "replicas"), [("prefill", ["Prefill"]), ("decode", ["Decode", "Front"])]
)
def test_one_replica_of_each_kind_fills_its_pod(group, replicas):
    options = [deployments()[name]["ray_actor_options"] for name in replicas]

    assert sum(option["num_cpus"] for option in options) == limit(group, "cpu")
    assert all(option["label_selector"] == GROUPS[group]["labels"] for option in options)


def test_there_is_a_pod_for_each_replica():
    assert SETTINGS.prefill is not None
    assert GROUPS["prefill"]["replicas"] == SETTINGS.prefill.replicas
    assert GROUPS["decode"]["replicas"] == SETTINGS.decode.replicas == SETTINGS.http.front_replicas


def test_no_engine_has_more_threads_than_it_has_cpus():
    assert SETTINGS.prefill is not None
    prefill, decode = SETTINGS.prefill.engine.threads, SETTINGS.decode.engine.threads

    assert prefill is not None
    assert prefill <= limit("prefill", "cpu")
    assert decode is not None
    assert decode <= deployments()["Decode"]["ray_actor_options"]["num_cpus"]


def test_head_runs_no_replica():
    assert GROUPS["head"]["rayStartParams"]["num-cpus"] == "0"


def test_http_port_is_the_same_everywhere():
    port = operator_rules.serve_config(SERVICE)["http_options"]["port"]

    assert port == SETTINGS.http.port
    for name in ("prefill", "decode"):
        container = operator_rules.ray_container(GROUPS[name])
        assert {"name": "serve", "containerPort": port} in container["ports"]
        assert container["readinessProbe"]["httpGet"]["port"] == port


def test_an_old_cluster_outlives_its_longest_stream():
    assert SERVICE["spec"]["rayClusterDeletionDelaySeconds"] >= SETTINGS.http.request_timeout_s


@pytest.mark.parametrize("name", ["Front", "Decode"])
def test_a_replaced_replica_outlives_its_longest_stream(name):
    assert deployments()[name]["graceful_shutdown_timeout_s"] >= SETTINGS.http.request_timeout_s


def test_a_replaced_prefill_worker_outlives_its_longest_transfer():
    assert deployments()["Prefill"]["graceful_shutdown_timeout_s"] >= SETTINGS.transfer.deadline_s


def test_image_is_this_version_with_the_ray_that_the_manifest_names():
    images = {operator_rules.ray_container(group)["image"] for group in GROUPS.values()}

    assert images == {f"baton:{PROJECT['project']['version']}"}
    assert SERVICE["spec"]["rayClusterConfig"]["rayVersion"] == metadata.version("ray")


def test_pods_run_as_the_image_s_user():
    user = re.search(r"^USER (\d+):(\d+)$", DOCKERFILE, re.MULTILINE)

    assert user is not None
    for name, group in GROUPS.items():
        context = operator_rules.pod(group)["securityContext"]
        assert (context["runAsUser"], context["runAsGroup"]) == (int(user[1]), int(user[2])), name
        container = operator_rules.ray_container(group)["securityContext"]
        assert not container["allowPrivilegeEscalation"], name


def test_image_has_the_model_that_is_served():
    assert f"RUN baton models pull {SETTINGS.model.source}\n" in DOCKERFILE


def test_image_is_built_from_every_package_and_file_it_needs():
    copied = re.findall(r"^COPY (?!--)(.+) \S+$", DOCKERFILE, re.MULTILINE)
    sources = {source for line in copied for source in line.split()}
    wheel = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]
    needed = {*wheel["packages"], "pyproject.toml", PROJECT["project"]["readme"], "LICENSE"}
    ignored = (manifests.K8S / "Dockerfile.dockerignore").read_text(encoding="utf-8").splitlines()

    assert sources == needed
    assert {line[1:] for line in ignored if line.startswith("!")} == needed
