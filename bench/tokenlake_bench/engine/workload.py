"""Prompts for the engine benchmark: seeded random tokens, and conversations whose requests two engines serve
alternately."""

from __future__ import annotations

import random
from dataclasses import dataclass


def prompt(tokens: int, seed: int | str, vocabulary: int = 1000) -> list[int]:
    """Random token ids, drawn by `seed`. Prompts of different seeds differ within the first few tokens."""
    source = random.Random(seed)
    return [source.randrange(vocabulary) for _ in range(tokens)]


@dataclass(frozen=True, slots=True)
class Conversations:
    """Several conversations that share few system prompts; the prompt of each request is the conversation so far and a
    new question."""

    conversations: int = 6
    turns: int = 4
    systems: int = 2
    system_tokens: int = 1024
    question_tokens: int = 300

    def questions(self, turn: int) -> list[list[int]]:
        """The new text of each conversation for one of its requests; the first request's text begins with the system
        prompt."""
        texts = []
        for number in range(self.conversations):
            question = prompt(self.question_tokens, 1000 + number * self.turns + turn)
            texts.append(prompt(self.system_tokens, number % self.systems) + question if turn == 0 else question)
        return texts
