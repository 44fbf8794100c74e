"""The requests of the router benchmark: chats of several turns that share few system prompts."""

from __future__ import annotations

import random
from dataclasses import dataclass

Message = dict[str, str]


def text(tokens: int, seed: str, vocabulary: int = 1000) -> str:
    """Random words of one token each, drawn by `seed`."""
    source = random.Random(seed)
    return " ".join(f"t{source.randrange(vocabulary)}" for _ in range(tokens))


@dataclass(frozen=True, slots=True)
class Sessions:
    """Chats whose requests follow from `seed` alone: the answers of earlier turns are drawn too, so that each
    arrangement gets the same requests."""

    sessions: int = 16
    turns: int = 4
    systems: int = 3
    system_tokens: int = 1024
    question_tokens: int = 256
    answer_tokens: int = 8
    seed: int = 0

    def request(self, session: int, turn: int) -> list[Message]:
        """The messages of one request: the system prompt, the earlier turns and a new question."""
        name = f"{self.seed} {session}"
        system = text(self.system_tokens, f"{self.seed} system {session % self.systems}")
        messages = [{"role": "system", "content": system}]
        for number in range(turn + 1):
            question = text(self.question_tokens, f"{name} question {number}")
            messages.append({"role": "user", "content": question})
            if number < turn:
                answer = text(self.answer_tokens, f"{name} answer {number}")
                messages.append({"role": "assistant", "content": answer})
        return messages

    @property
    def longest(self) -> int:
        """Tokens of the longest request and its answer."""
        return self.system_tokens + self.turns * (self.question_tokens + self.answer_tokens)

    @property
    def distinct_tokens(self) -> int:
        """Tokens of all prompts, with each shared part counted once."""
        systems = min(self.systems, self.sessions)
        own = self.turns * self.question_tokens + (self.turns - 1) * self.answer_tokens
        return systems * self.system_tokens + self.sessions * own

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts together."""
        turn = self.question_tokens + self.answer_tokens
        each = self.turns * (self.system_tokens + self.question_tokens) + turn * self.turns * (self.turns - 1) // 2
        return self.sessions * each
