"""The protocols read as their stories tell."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest

from tests.stories import scenes
from tests.stories.render import Story

FOLDER = Path(__file__).parent
SCENES = dict(inspect.getmembers(scenes, lambda each: getattr(each, "__module__", "") == scenes.__name__))


def text(name: str) -> str:
    """The text of a story: the docstring of its scene, an empty line, and its lines."""
    story = Story(**scenes.RULES.get(name, {}))
    SCENES[name](story)
    story.cluster.run_for(0.1)
    story.cluster.check()
    return "\n".join([inspect.getdoc(SCENES[name]) or "", "", *story.lines(), ""])


@pytest.mark.parametrize("name", SCENES)
def test_a_protocol_reads_as_its_story_tells(name: str) -> None:
    told, written = text(name).splitlines(), (FOLDER / f"{name}.txt").read_text().splitlines()
    assert max(map(len, told)) <= 100
    assert told == written, "if the change is meant, write the stories with `python -m tests.stories`"
