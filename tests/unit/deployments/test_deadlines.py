"""The table of deadlines in docs/kv-handoff.md says what the code has."""

from __future__ import annotations

import inspect
import re
import socket
from datetime import timedelta
from pathlib import Path

from configs.schema import Settings
from deployments import app, front, http_generation, leaving, pipeline, serving
from deployments.channel import stream
from deployments.channel.stream import ChannelTimings
from deployments.resume import ResumeConfig
from kv_transfer import transfer_thread
from kv_transfer.sender import KVSender
from kv_transfer.transports import group_backends, nixl, process_group
from kv_transfer.transports.pair_table import PairLimits
from kv_transfer.transports.stream_server import StreamTimings
from workers import handoff
from workers.decode_config import DecodeConfig
from workers.engine import loop
from workers.engine.loop import Engine

REPOSITORY = Path(__file__).resolve().parents[3]
DOCUMENT = REPOSITORY / "docs" / "kv-handoff.md"
SETTINGS = Settings()
CHANNEL = ChannelTimings()
RESUME = ResumeConfig(silence_s=SETTINGS.decode.silence_s)
DECODE = DecodeConfig(local_prefill_tokens=0, transfer_deadline_s=SETTINGS.transfer.deadline_s)
STREAM = StreamTimings()
PAIRS = PairLimits()
KEEP_ALIVE = {option: value for _, option, value in stream._KEEP_ALIVE}

VALUES = {
    "http.request_timeout_s": SETTINGS.http.request_timeout_s,
    "decode.silence_s": SETTINGS.decode.silence_s,
    "decode.engine.queue_limit": SETTINGS.decode.engine.queue_limit,
    "transfer.deadline_s": SETTINGS.transfer.deadline_s,
    "transfer.lease_s": SETTINGS.transfer.lease_s,
    "_STALLED_S": http_generation._STALLED_S,
    "_CLOSE_TIMEOUT_S": pipeline._CLOSE_TIMEOUT_S,
    "_ASK_TIMEOUT_S": front._ASK_TIMEOUT_S,
    "ResumeConfig.answer_s": RESUME.answer_s,
    "ResumeConfig.pause_s": RESUME.pause_s,
    "ResumeConfig.max_losses": RESUME.max_losses,
    "ChannelTimings.connect_s": CHANNEL.connect_s,
    "ChannelTimings.beat_s": CHANNEL.beat_s,
    "ChannelTimings.close_s": CHANNEL.close_s,
    "ChannelTimings.find_s": CHANNEL.find_s,
    "ChannelTimings.find_first_s": CHANNEL.find_first_s,
    "_KEEP_ALIVE": KEEP_ALIVE[socket.TCP_USER_TIMEOUT] / 1000,
    "DecodeConfig.accept_timeout_s": DECODE.accept_timeout_s,
    "DecodeConfig.attempts": DECODE.attempts,
    "DecodeConfig.heartbeat_s": DECODE.heartbeat_s,
    "DecodeConfig.rest_s": DECODE.rest_s,
    "KVSender.sweep_s": inspect.signature(KVSender).parameters["sweep_s"].default,
    "_ABORT_S": process_group._ABORT_S,
    "MAX_TURN_S": transfer_thread.MAX_TURN_S,
    "StreamTimings.connect_s": STREAM.connect_s,
    "StreamTimings.silence_s": STREAM.silence_s,
    "StreamTimings.keep_alive_s": STREAM.keep_alive_s,
    "PairLimits.pair_s": PAIRS.pair_s,
    "PairLimits.idle_s": PAIRS.idle_s,
    "_MESSAGE_DEADLINE": process_group._MESSAGE_DEADLINE.total_seconds(),
    "_PATIENCE_S": nixl._PATIENCE_S,
    "_KEEP_S": nixl._KEEP_S,
    "_AT_ONCE": group_backends._AT_ONCE / timedelta(milliseconds=1),
    "_LAST_ANSWER_TIMEOUT_S": handoff._LAST_ANSWER_TIMEOUT_S,
    "MAX_STEP_S": loop.MAX_STEP_S,
    "Engine.stop.timeout_s": inspect.signature(Engine.stop).parameters["timeout_s"].default,
    "_HEALTH_PERIOD_S": app._HEALTH_PERIOD_S,
    "_HEALTH_TIMEOUT_S": app._HEALTH_TIMEOUT_S,
    "_DRAIN_TIMEOUT_S": app._DRAIN_TIMEOUT_S,
    "_LAST_WORDS_S": leaving._LAST_WORDS_S,
    "_DRAIN_S": serving._DRAIN_S,
    "_INTRODUCE_TIMEOUT_S": serving._INTRODUCE_TIMEOUT_S,
}
WORDS = {"two": 2.0, "four": 4.0}


def rows() -> list[tuple[str, str]]:
    """What each row says, and what its last cell names."""
    _, _, rest = DOCUMENT.read_text("utf-8").partition("<!-- deadlines")
    table, _, _ = rest.partition("<!-- end of deadlines -->")
    cells = [line.split("|") for line in table.splitlines() if line.startswith("| ")]
    return [(f"{what} {after}", names) for _, _, what, after, names, _ in cells[2:]]


def test_every_bound_is_the_code_s() -> None:
    said: dict[str, set[float]] = {}
    for text, names in rows():
        numbers = {float(number) for number in re.findall(r"\d+(?:\.\d+)?", text)}
        numbers |= {WORDS[word] for word in re.findall(r"[a-z]+", text) if word in WORDS}
        for name in re.findall("`([^`]+)`", names):
            if "/" not in name:
                said.setdefault(name, set()).update(numbers)

    assert said.keys() == VALUES.keys()
    assert [name for name, value in VALUES.items() if value not in said[name]] == []


def test_every_file_is_there() -> None:
    names = {name for _, names in rows() for name in re.findall("`([^`]+)`", names)}
    files = [name for name in names if "/" in name]

    assert files
    assert [file for file in files if not (REPOSITORY / file).is_file()] == []
