"""The Serve config places deployments by names that the application really has."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
from ray import serve
from ray.serve._private.api import call_user_app_builder_with_args_if_necessary
from ray.serve._private.build_app import build_app

from deployments.app import build
from tests.unit.k8s import manifests, operator_rules


def unknown_names(application: Mapping[str, Any], builder: Callable[..., Any]) -> set[str]:
    """Deployments that are placed but that the builder does not make; Serve would refuse them."""
    built = build_app(
        call_user_app_builder_with_args_if_necessary(builder, dict(application["args"])),
        name=application["name"],
    )
    placed = {deployment["name"] for deployment in application["deployments"]}
    return placed - {deployment.name for deployment in built.deployments}


@pytest.fixture
def application() -> Mapping[str, Any]:
    (service,) = manifests.of_kind("RayService").values()
    (entry,) = operator_rules.serve_config(service)["applications"]
    result: Mapping[str, Any] = entry
    return result


def test_every_placed_deployment_is_one_of_the_application_s(application):
    assert unknown_names(application, build) == set()


def test_a_name_that_the_application_lacks_is_reported(application):
    @serve.deployment(name="Front")
    class OnlyFront:
        """An application of one deployment."""

    def build_less(args: Mapping[str, Any]) -> serve.Application:
        assert args.keys() == {"settings"}
        return OnlyFront.bind()

    assert unknown_names(application, build_less) == {"Decode", "Prefill"}
