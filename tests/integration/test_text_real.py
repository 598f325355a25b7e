"""Text with the default model's own files; skipped where it was not pulled."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deployments.text.chat import ChatEncoder
from deployments.text.detokenizer import Detokenizer
from deployments.text.tokenizer import TextTokenizer
from workers.models.errors import ModelNotFoundError
from workers.models.loading import load_tokenizer
from workers.models.store import ModelStore, default_cache_dir

pytestmark = pytest.mark.model

NAME = "smollm2-135m"
VOCABULARY = 49152
TEXTS = st.text(st.sampled_from("a \n\u00e9\uc548\ub155\U0001f600\u200d\U0001f4bb1."), max_size=30)


@pytest.fixture(scope="module")
def model_path():
    try:
        return ModelStore(default_cache_dir(os.environ)).resolve(NAME).path
    except ModelNotFoundError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def codec(model_path):
    with ThreadPoolExecutor(1) as executor:
        yield TextTokenizer.from_directory(model_path, executor)


@pytest.fixture(scope="module")
def reference(model_path):
    """The same model's tokenizer as transformers loads it."""
    return load_tokenizer(model_path)


@settings(deadline=None)
@given(token_ids=st.lists(st.integers(0, VOCABULARY - 1), max_size=40))
def test_joined_deltas_are_the_text_of_all_ids(codec, token_ids):
    """Row 45."""
    detokenizer = Detokenizer(codec.decode)
    deltas = [detokenizer.push(token_id) for token_id in token_ids]
    assert "".join([*deltas, detokenizer.flush()]) == codec.decode(token_ids)


@settings(deadline=None)
@given(text=TEXTS)
async def test_text_comes_back_whole_and_as_transformers_reads_it(codec, reference, text):
    token_ids = await codec.encode(text, add_special_tokens=True)
    assert list(token_ids) == reference(text)["input_ids"]
    detokenizer = Detokenizer(codec.decode)
    deltas = [detokenizer.push(token_id) for token_id in token_ids]
    assert not any("\ufffd" in delta for delta in deltas)
    assert "".join(deltas) == text
    assert detokenizer.flush() == ""


async def test_a_conversation_is_what_transformers_makes_of_it(codec, reference, model_path):
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi \uc548\ub155"},
        {"role": "assistant", "content": "Hello!"},
        {"role": "user", "content": "And?"},
    ]
    chat = ChatEncoder.from_directory(model_path)
    for conversation in (messages, messages[1:], messages[1:2]):
        text = chat.render(conversation)
        assert text == reference.apply_chat_template(
            conversation, add_generation_prompt=True, tokenize=False
        )
        expected = reference(text, add_special_tokens=False)["input_ids"]
        assert list(await codec.encode(text, add_special_tokens=False)) == expected
