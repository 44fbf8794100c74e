"""`tokenlake explain --prompt`: the text at the token where a prompt leaves what is known."""

from __future__ import annotations

from pathlib import Path

import click
import pytest

from tokenlake.wire.funnel import Funnel
from tokenlake_operator.prompt_text import Prompt

tokenizers = pytest.importorskip("tokenizers", reason="not installed: tokenizers")

TEXT = "You are helpful.\nx-nonce: 61f0a7 and more\nBe brief."


@pytest.fixture
def prompt(tmp_path: Path) -> Prompt:
    """A prompt with one token for each byte, behind a token that begins each text."""
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator([], tokenizers.trainers.BpeTrainer(initial_alphabet=alphabet, special_tokens=["<s>"]))
    made.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    made.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "prompt.txt").write_text(TEXT)
    return Prompt(tmp_path / "prompt.txt", tmp_path)


def funnel(tokens: int, leaves_at: int) -> Funnel:
    return Funnel("r", "a", 1.0, 8, tokens, 0, (), 0, 0, 0, (), 0, leaves_at, 1, 1)


def test_the_characters_of_a_segment(prompt: Prompt) -> None:
    said = prompt.place(funnel(len(TEXT), 24))
    assert said == "these are the characters 24 to 31 of the text, in line 2: ': 61f0a7'"


def test_a_token_that_begins_each_text(prompt: Prompt) -> None:
    assert "characters 23 to 30" in prompt.place(funnel(len(TEXT) + 1, 24))


def test_another_text_than_that_of_the_request(prompt: Prompt) -> None:
    said = prompt.place(funnel(400, 24))
    assert said.startswith(f"the text has {len(TEXT) + 1} tokens, and the prompt had 400")


def test_a_file_that_is_no_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "prompt.txt").write_text(TEXT)
    with pytest.raises(click.ClickException, match="cannot be read"):
        Prompt(tmp_path / "prompt.txt", tmp_path)
