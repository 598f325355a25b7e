"""The rewrite of Ray's HAProxy config, on Ray's own template."""

import subprocess
import sys

import pytest

from deployments.cluster.haproxy import UnexpectedConfigError, narrow, unsplice

CONFIG = """\
global
    log 127.0.0.1:514 local0 info
    stats socket /run/x/a mode 666 level admin expose-fd listeners
defaults
    log global
    option abortonclose
    option splice-request
    option splice-response
frontend prometheus
    bind :9101
    no log
frontend http_frontend
    bind 127.0.0.1:8000
    # bind is a word in a comment here
backend http-app
    server replica 127.0.0.1:30000 check
frontend grpc_frontend
    bind *:9000 proto h2
listen stats
  bind *:8404
  stats enable
"""


def binds(config: str) -> list[str]:
    return [line.strip() for line in config.splitlines() if line.strip().startswith("bind")]


def test_only_the_clients_frontend_follows_the_host() -> None:
    assert binds(narrow(CONFIG, host="0.0.0.0")) == [
        "bind 127.0.0.1:9101",
        "bind 0.0.0.0:8000",
        "bind 127.0.0.1:9000 proto h2",
        "bind 127.0.0.1:8404",
    ]


def test_other_lines_stay_but_for_syslog_splicing_and_the_socket_mode() -> None:
    before, after = CONFIG.splitlines(), narrow(CONFIG, host="127.0.0.1").splitlines()

    assert [line for line in before if "bind " not in line and line not in after] == [
        "    log 127.0.0.1:514 local0 info",
        "    stats socket /run/x/a mode 666 level admin expose-fd listeners",
        "    option splice-request",
    ]
    assert "    stats socket /run/x/a mode 600 level admin expose-fd listeners" in after


def test_narrowing_twice_changes_nothing() -> None:
    once = narrow(CONFIG, host="127.0.0.1")

    assert narrow(once, host="127.0.0.1") == once


@pytest.mark.parametrize("line", ["bind fd@3", "bind :8000-8010", "bind :80,:81", "bind"])
def test_unknown_form_of_a_bind_line_is_refused(line: str) -> None:
    with pytest.raises(UnexpectedConfigError, match="listens"):
        narrow(f"frontend x\n    {line}\n", host="127.0.0.1")


def test_rays_template_has_the_frontend_that_is_looked_for() -> None:
    templates = pytest.importorskip("ray.serve._private.haproxy_templates")

    assert "\nfrontend http_frontend\n" in templates.HAPROXY_CONFIG_TEMPLATE


def test_rays_template_notices_clients_that_leave_but_for_the_splicing() -> None:
    """The template is filled in by jinja; these lines are plain text in it."""
    templates = pytest.importorskip("ray.serve._private.haproxy_templates")
    lines = narrow(templates.HAPROXY_CONFIG_TEMPLATE.replace("bind ", "#"), host="x").splitlines()
    options = {line.strip() for line in lines}

    assert "option abortonclose" in options
    assert not {"option splice-request", "option splice-auto"} & options


def test_pods_haproxy_is_given_the_config_without_splicing_and_with_its_binds(tmp_path) -> None:
    """`baton-haproxy -c` has the real HAProxy check the config that it rewrote."""
    config = tmp_path / "haproxy.cfg"
    plain = "defaults\n    mode http\n    timeout client 1s\n    option splice-request\n"
    config.write_text(plain + "frontend f\n    bind :9\n")
    command = [sys.executable, "-c", "from deployments.cluster.haproxy import main; main()"]
    done = subprocess.run([*command, "-c", "-f", str(config)], capture_output=True, timeout=30)

    assert "splice" not in config.read_text()
    assert "bind :9" in config.read_text()
    assert done.returncode == 0, done.stderr


def test_unsplice_changes_nothing_else() -> None:
    without = [line for line in CONFIG.splitlines() if "splice-request" not in line]

    assert unsplice(CONFIG).splitlines() == without
