"""Two workers link if their layouts are one, or can be repacked, and else are told what is not."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_transfer.compatibility import check_compatible
from kv_transfer.geometry import KVLayout
from kv_transfer.handoff import PeerInfo
from kv_transfer.transport import LinkRefusedError

DTYPES = ("fp32", "bf16", "fp16")
FIELDS = {
    "model_digest": st.sampled_from(["a" * 64, "b" * 64]),
    "dtype": st.sampled_from(DTYPES),
    "element_bytes": st.sampled_from([1, 2, 4]),
    "num_layers": st.integers(1, 6),
    "num_kv_heads": st.integers(1, 8),
    "head_dim": st.sampled_from([8, 64, 128]),
    "block_size": st.sampled_from([1, 16, 32]),
}
NAMED = {
    "model_digest": "model",
    "dtype": "dtype",
    "num_layers": "number of layers",
    "num_kv_heads": "number of KV heads",
    "head_dim": "head size",
}
WINDOW = 1024


def peer(layout: KVLayout, worker_id: str, window: int = WINDOW) -> PeerInfo:
    return PeerInfo.of(
        layout, worker_id=worker_id, incarnation="i", max_model_len=window, pool_tokens=window
    )


layouts = st.builds(KVLayout, **FIELDS)


@given(values=st.fixed_dictionaries(FIELDS))
def test_equal_settings_make_equal_layouts_and_may_link(values):
    """In whatever process and order they were read."""
    backwards = dict(reversed(values.items()))
    check_compatible(peer(KVLayout(**values), "p"), peer(KVLayout(**backwards), "d"))


@given(layout=layouts, data=st.data())
def test_each_field_alone_keeps_two_workers_apart(layout, data):
    name = data.draw(st.sampled_from(sorted(FIELDS)))
    ours = getattr(layout, name)
    theirs = data.draw(FIELDS[name].filter(lambda value: value != ours))
    other = dataclasses.replace(layout, **{name: theirs})
    if name == "block_size":  # which is repacked
        check_compatible(peer(layout, "prefill-0"), peer(other, "decode-0"))
        return

    with pytest.raises(LinkRefusedError) as refused:
        check_compatible(peer(layout, "prefill-0"), peer(other, "decode-0"))

    said = str(refused.value)
    if name in NAMED:
        assert said == f"{NAMED[name]} differs: {ours} on prefill-0, {theirs} on decode-0"
    else:
        assert said.startswith("bytes per block differs")


@given(layout=layouts, theirs=FIELDS["block_size"], data=st.data())
def test_block_sizes_keep_two_workers_apart_where_anything_else_differs(layout, theirs, data):
    """Also where it is a sliding window, of one or of both, or which heads a pool has."""
    name = data.draw(st.sampled_from(["sliding_windows", "tp_rank", *sorted(set(FIELDS))]))
    windows = (8,) * layout.num_layers
    changes = {"sliding_windows": (9,) * layout.num_layers, "tp_rank": 1}
    if name == "sliding_windows":
        layout = dataclasses.replace(layout, sliding_windows=windows)
    elif name == "tp_rank":
        layout = dataclasses.replace(layout, tp_size=2)
    elif name == "block_size":
        name = "sliding_windows"
    else:
        changes[name] = data.draw(FIELDS[name].filter(lambda v: v != getattr(layout, name)))
    other = dataclasses.replace(layout, block_size=layout.block_size + theirs)
    other = dataclasses.replace(other, **{name: changes[name]})

    with pytest.raises(LinkRefusedError, match=r" on prefill-0, .* on decode-0$"):
        check_compatible(peer(layout, "prefill-0"), peer(other, "decode-0"))


@given(layout=layouts, theirs=FIELDS["block_size"], window=st.integers(2, 64))
def test_block_sizes_keep_no_workers_apart_whose_layers_have_the_same_windows(
    layout, theirs, window
):
    windowed = dataclasses.replace(layout, sliding_windows=(window,) * layout.num_layers)
    other = dataclasses.replace(windowed, block_size=theirs)
    check_compatible(peer(windowed, "prefill-0"), peer(other, "decode-0"))


@given(layout=layouts, data=st.data())
def test_a_sliding_window_keeps_two_workers_apart(layout, data):
    windows = tuple(
        data.draw(st.one_of(st.none(), st.integers(2, 64))) for _ in range(layout.num_layers)
    )
    other = dataclasses.replace(layout, sliding_windows=windows)
    if other.groups == layout.groups:
        check_compatible(peer(layout, "p"), peer(other, "d"))
        return
    with pytest.raises(LinkRefusedError, match=r"^(bytes per block|layout fingerprint) differs"):
        check_compatible(peer(layout, "p"), peer(other, "d"))


@given(layout=layouts, ours=st.integers(1, 4096), theirs=st.integers(1, 4096))
def test_windows_must_be_equal(layout, ours, theirs):
    pair = peer(layout, "prefill-0", ours), peer(layout, "decode-0", theirs)
    if ours == theirs:
        check_compatible(*pair)
        return
    with pytest.raises(LinkRefusedError) as refused:
        check_compatible(*pair)
    assert str(refused.value) == f"window differs: {ours} on prefill-0, {theirs} on decode-0"
