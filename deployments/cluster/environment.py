"""The environment that Ray and Serve are run with.

Both read it at import, in this process and in each one they start, so `prepare_environment` has
to run before the first `import ray`. What differs between instances is read by the processes that
Ray starts, and is set just before they start.
"""

import os
import sys
from collections.abc import Mapping, MutableMapping
from pathlib import Path

from deployments.cluster.errors import EnvironmentTooLateError
from deployments.cluster.ports import Ports
from deployments.cluster.processes import MARKER
from deployments.secret import SECRET_VARIABLE
from kv_transfer.authentication import Secret

FIXED: Mapping[str, str] = {
    # Ray takes the host's outer address for its own and listens on every interface. Where it
    # supports no clusters of several hosts (macOS, Windows) it uses 127.0.0.1 throughout; this
    # switch asks for that here. It is the only one that reaches gcs, raylet, agents and workers.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    # HAProxy in front and gRPC between replicas: 8 to 10 times less CPU per request and token.
    "RAY_SERVE_ENABLE_HA_PROXY": "1",
    "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
    "RAY_SERVE_HAPROXY_NBTHREAD": "1",
    # A log line per request to a Python actor that counts them: our own metrics say the same.
    "RAY_SERVE_HAPROXY_METRICS_ENABLED": "0",
    # A proxy that is not ready in time is killed, and the start of the service with it; on a busy
    # host, or with cold files, its imports alone take longer than 5 s, the default.
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",
    # A replica leaves HAProxy's list within 0.1 s of being told to stop; 30 s, the default, is
    # for load balancers beyond our host, and would be waited for at each shutdown.
    "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "0.5",
    "RAY_SERVE_PROXY_MIN_DRAINING_PERIOD_S": "0.5",
    # Autoscaling sees load that is 2 s old at most rather than 10 s.
    "RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "2",
    "RAY_SERVE_HANDLE_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "2",
    # Idle work, 0.14 core of a two-core host by default and 0.09 with these: the controller looks
    # around 4 times a second rather than 10, and statistics for a dashboard are not gathered.
    "RAY_SERVE_CONTROL_LOOP_INTERVAL_S": "0.25",
    "RAY_SERVE_METRICS_EXPORT_INTERVAL_MS": "5000",
    "RAY_enable_metrics_collection": "0",
    "RAY_task_events_report_interval_ms": "0",
    "RAY_raylet_report_resources_period_milliseconds": "1000",
    "REPORTER_UPDATE_INTERVAL_MS": "60000",
    "RAY_USAGE_STATS_ENABLED": "0",
    # Workers run at niceness 15 by default: whatever else a host does would go before an answer.
    "RAY_worker_niceness": "0",
    # Processes that set their title overwrite their environment, and with it our marker.
    "SPT_NOENV": "1",
    # Each worker runs this first; see worker_hook. (Public as `worker_process_setup_hook`, but a
    # runtime environment for that alone would cost a start of every worker.)
    "__RAY_WORKER_PROCESS_SETUP_HOOK_ENV_VAR": (
        "deployments.cluster.worker_hook.keep_grpc_on_loopback"
    ),
}


def prepare_environment(environ: MutableMapping[str, str] = os.environ) -> None:
    """Set what Ray reads when it is imported; a no-op where that is already set.

    `LocalCluster` does this itself. Call it first in a process that imports ray on its own.
    """
    missing = {name: value for name, value in FIXED.items() if environ.get(name) != value}
    if missing and "ray" in sys.modules:
        raise EnvironmentTooLateError(
            f"ray was imported before its environment was set ({', '.join(sorted(missing))}): "
            "call prepare_environment() before the first import of ray"
        )
    environ.update(missing)


def instance_environment(
    *,
    instance_id: str,
    runtime_dir: Path,
    ports: Ports,
    launcher: Path,
    token: Path,
    secret: Secret,
    python_path: str,
) -> dict[str, str]:
    """What the processes of one instance are started with, beside FIXED.

    HAProxy's paths are short on purpose: Ray puts 56 characters into each of them, and the path
    of a socket may have about 100.
    """
    root = str(Path(__file__).resolve().parents[2])
    return {
        MARKER: instance_id,
        # Our workers prove to each other with this one. Here and not in a runtime environment,
        # which Ray shows.
        SECRET_VARIABLE: secret.reveal(),
        # Ray's processes prove to each other with this token that they belong together. By default
        # it is one file in the home directory, which need not be writable and which all share.
        "RAY_AUTH_TOKEN_PATH": str(token),
        "RAY_SERVE_HAPROXY_BINARY_PATH": str(launcher),
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": str(runtime_dir / "haproxy.cfg"),
        "RAY_SERVE_HAPROXY_SOCKET_PATH": str(runtime_dir / "a"),
        "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": str(runtime_dir / "m"),
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(runtime_dir),
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": str(runtime_dir / "state"),
        "RAY_SERVE_HAPROXY_METRICS_PORT": str(ports.metrics),
        "RAY_SERVE_HAPROXY_STATS_PORT": str(ports.stats),
        "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": str(ports.fallback),
        "RAY_SERVE_FALLBACK_PROXY_GRPC_PORT": str(ports.fallback_grpc),
        "RAY_SERVE_DIRECT_INGRESS_MIN_HTTP_PORT": str(ports.first_replica),
        "RAY_SERVE_DIRECT_INGRESS_MAX_HTTP_PORT": str(ports.last_replica),
        # workers import worker_hook before they know the path of the process that started Ray
        "PYTHONPATH": os.pathsep.join(filter(None, [root, python_path])),
    }
