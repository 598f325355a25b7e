"""Keys that Serve would drop without a word are named."""

from typing import Any

import pytest

from deployments.cluster.errors import ServeConfigError
from deployments.cluster.serve_config import parse_serve_config


def config(**application: Any) -> dict[str, Any]:
    return {"applications": [{"name": "a", "import_path": "module:build", **application}]}


def test_full_config_is_accepted() -> None:
    deployment = {
        "name": "Decode",
        "max_ongoing_requests": 64,
        "user_config": {"anything": {"goes": 1}},
        "autoscaling_config": {"min_replicas": 1, "max_replicas": 2},
        "ray_actor_options": {"num_cpus": 0.5, "runtime_env": {"env_vars": {"A": "1"}}},
    }
    parsed = parse_serve_config(
        {
            "http_options": {"request_timeout_s": 60},
            **config(
                args={"free": {"form": True}},
                autoscaling_policy={"policy_function": "module:scale"},
                deployments=[deployment],
            ),
        }
    )

    assert parsed.applications[0].deployments[0].max_ongoing_requests == 64


@pytest.mark.parametrize(
    ("broken", "named"),
    [
        ({"application": []}, "unknown key application (did you mean applications?)"),
        ({"http_options": {"hots": "x"}}, "unknown key http_options.hots (did you mean host?)"),
        (config(route="/"), "unknown key applications[0].route"),
        (
            config(deployments=[{"name": "D", "max_ongoing_request": 64}]),
            "unknown key applications[0].deployments[0].max_ongoing_request "
            "(did you mean max_ongoing_requests?)",
        ),
        (
            config(deployments=[{"name": "D", "ray_actor_options": {"num_cpu": 1}}]),
            "applications[0].deployments[0].ray_actor_options.num_cpu",
        ),
        (
            config(deployments=[{"name": "D", "autoscaling_config": {"min_replica": 1}}]),
            "applications[0].deployments[0].autoscaling_config.min_replica",
        ),
        (
            config(autoscaling_policy={"policy_functions": "m:f"}),
            "applications[0].autoscaling_policy.policy_functions",
        ),
    ],
)
def test_unknown_key_is_named_with_its_place(broken: dict[str, Any], named: str) -> None:
    with pytest.raises(ServeConfigError) as caught:
        parse_serve_config(broken)

    assert named in str(caught.value)


def test_wrong_value_is_named_with_its_place() -> None:
    with pytest.raises(ServeConfigError, match=r"applications\.0\.deployments\.0\.max_ongoing"):
        parse_serve_config(config(deployments=[{"name": "D", "max_ongoing_requests": "many"}]))
