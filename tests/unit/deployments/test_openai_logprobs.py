"""Log-probabilities in the shapes of the three APIs."""

from __future__ import annotations

import json
import math

from deployments.openai.answer import Candidate, TokenEntry
from deployments.openai.logprobs import chat_logprobs, completion_logprobs, prompt_logprobs


def candidate(token_id: int, data: bytes, logprob: float | None = -1.0, rank: int = 1) -> Candidate:
    return Candidate(token_id=token_id, data=data, logprob=logprob, rank=rank)


FIRST = TokenEntry(token=candidate(1, b"<s>", None, 0), top=(), offset=0)
HALF = TokenEntry(
    token=candidate(5, b"\xf0\x9f", -2.0, 3),
    top=(candidate(6, b" a", -0.25, 1), candidate(7, b"\xf0", -0.5, 2)),
    offset=4,
)
RARE = TokenEntry(token=candidate(8, b"x", -math.inf, 900), top=(), offset=5)


def test_completions_have_four_lists_and_the_token_is_among_its_alternatives():
    """Row 63: a prompt's first token is there, with null for what nothing predicts."""
    assert completion_logprobs([FIRST, HALF, RARE]) == {
        "tokens": ["<s>", "bytes:\\xf0\\x9f", "x"],
        "token_logprobs": [None, -2.0, -9999.0],
        "top_logprobs": [
            None,
            {" a": -0.25, "bytes:\\xf0": -0.5, "bytes:\\xf0\\x9f": -2.0},
            {"x": -9999.0},
        ],
        "text_offset": [0, 4, 5],
    }


def test_chat_has_a_list_of_tokens_with_their_bytes():
    assert chat_logprobs([HALF]) == {
        "content": [
            {
                "token": "bytes:\\xf0\\x9f",
                "logprob": -2.0,
                "bytes": [0xF0, 0x9F],
                "top_logprobs": [
                    {"token": " a", "logprob": -0.25, "bytes": [0x20, 0x61]},
                    {"token": "bytes:\\xf0", "logprob": -0.5, "bytes": [0xF0]},
                ],
            }
        ],
        "refusal": None,
    }
    assert chat_logprobs([]) == {"content": [], "refusal": None}


def test_prompts_have_an_object_by_token_id():
    assert prompt_logprobs([FIRST, HALF, RARE]) == [
        None,
        {
            "6": {"logprob": -0.25, "rank": 1, "decoded_token": " a"},
            "7": {"logprob": -0.5, "rank": 2, "decoded_token": "bytes:\\xf0"},
            "5": {"logprob": -2.0, "rank": 3, "decoded_token": "bytes:\\xf0\\x9f"},
        },
        {"8": {"logprob": -9999.0, "rank": 900, "decoded_token": "x"}},
    ]


def test_of_two_tokens_with_one_text_the_likelier_counts_but_the_tokens_own_is_kept():
    entry = TokenEntry(
        token=candidate(9, b"a", -3.0, 3),
        top=(candidate(1, b"a", -0.5), candidate(2, b"b", -0.7), candidate(3, b"b", -0.9)),
        offset=0,
    )
    assert completion_logprobs([entry])["top_logprobs"] == [{"a": -3.0, "b": -0.7}]


def test_tokens_can_be_named_by_their_ids():
    """Two tokens of one text are two then; the bytes of chat are those of the text still."""
    assert completion_logprobs([FIRST, HALF], by_id=True) == {
        "tokens": ["token_id:1", "token_id:5"],
        "token_logprobs": [None, -2.0],
        "top_logprobs": [None, {"token_id:6": -0.25, "token_id:7": -0.5, "token_id:5": -2.0}],
        "text_offset": [0, 4],
    }
    (entry,) = chat_logprobs([HALF], by_id=True)["content"]
    assert (entry["token"], entry["bytes"]) == ("token_id:5", [0xF0, 0x9F])
    named = [(each["token"], each["bytes"]) for each in entry["top_logprobs"]]
    assert named == [("token_id:6", [0x20, 0x61]), ("token_id:7", [0xF0])]


def test_all_of_it_is_json():
    for shape in (completion_logprobs, chat_logprobs, prompt_logprobs):
        json.dumps(shape([HALF, RARE]), allow_nan=False)
