"""The tokenizer as Front uses it: the model's own start tokens, no silent cuts, off the loop."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
from tokenizers.processors import TemplateProcessing

from deployments.text.tokenizer import TextTokenizer
from tests.fakes.tokenizer import byte_level_tokenizer


class CountingExecutor(ThreadPoolExecutor):
    """Counts what it is given."""

    def __init__(self) -> None:
        super().__init__(1)
        self.num_submitted = 0

    def submit(self, *args, **kwargs):
        self.num_submitted += 1
        return super().submit(*args, **kwargs)


@pytest.fixture
def executor():
    with CountingExecutor() as pool:
        yield pool


async def test_start_tokens_are_added_only_where_asked_for(executor):
    tokenizer = byte_level_tokenizer()
    tokenizer.post_processor = TemplateProcessing(
        single="<|start|> $A", special_tokens=[("<|start|>", 0)]
    )
    codec = TextTokenizer(tokenizer, executor)
    plain = await codec.encode("hello", add_special_tokens=False)
    assert await codec.encode("hello", add_special_tokens=True) == (0, *plain)
    assert 0 not in plain


async def test_limits_of_the_file_do_not_cut_or_pad_a_prompt(executor, tmp_path):
    tokenizer = byte_level_tokenizer()
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=4)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    codec = TextTokenizer.from_directory(tmp_path, executor)
    text = "the quick brown fox jumps over it"
    assert codec.decode(await codec.encode(text, add_special_tokens=True)) == text


async def test_only_long_texts_leave_the_loop(executor):
    codec = TextTokenizer(byte_level_tokenizer(), executor)
    await codec.encode("short", add_special_tokens=False)
    assert executor.num_submitted == 0
    long = "the quick " * 1000
    assert codec.decode(await codec.encode(long, add_special_tokens=False)) == long
    assert executor.num_submitted == 1


async def test_ids_without_a_text_are_left_out(executor):
    codec = TextTokenizer(byte_level_tokenizer(), executor)
    (letter,) = await codec.encode("a", add_special_tokens=False)
    assert codec.decode([letter, codec.vocab_size + 5]) == "a"


def test_the_http_side_loads_no_tensor_library():
    """Front must start fast and stay small."""
    code = (
        "import sys, deployments.http_app, deployments.text.tokenizer, deployments.text.chat;"
        "print([m for m in ('torch', 'transformers', 'numpy', 'ray') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
