"""Prompts with images: the same tokens as without the pool, and equal images share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from vllm.multimodal.hasher import MultiModalHasher

from tests.engines.vllm.conftest import TINY, again, prompt
from tests.engines.vllm.forked import refusals
from tests.engines.vllm.scenario import Three, check_scenario, three
from tokenlake_client.engines.vllm.known.request import media_digests
from tokenlake_testing.cluster import Cluster
from tokenlake_testing.engine_lines import Engine
from tokenlake_testing.families import save_pictures
from tokenlake_testing.vllm_engine import image_of

pytestmark = [pytest.mark.live, pytest.mark.timeout(300)]

QUERIES = 300
"""The number of tokens of an image; it lies in two segments."""


class Feature:
    """An image of a request, as vLLM describes it."""

    modality = "image"
    offset = 0
    length = QUERIES

    def __init__(self, identifier: str) -> None:
        self.identifier = identifier
        self.mm_hash: str | None = identifier
        self.mm_position = self


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_pictures(tmp_path_factory.mktemp("pictures"), TINY, QUERIES)


@pytest.fixture(scope="module")
def engines(start: Callable[..., Engine], cluster: Cluster, pictures: Path) -> Three:
    return three(start, cluster, pictures, skip_tokenizer_init=False)


def test_an_image(engines: Three, cluster: Cluster, pictures: Path) -> None:
    name = MultiModalHasher.hash_kwargs("blake3", model_id=str(pictures), image=image_of(1))
    one = replace(
        engines,
        request={"image": (1, None)},
        identity={"extras": media_digests([Feature(name)], 256)},
        before=[TINY.vocabulary - 1] * QUERIES,
    )
    check_scenario(one, cluster, 60, [prompt(600, 60), prompt(500, 61)])


def test_equal_images_share_and_others_do_not(engines: Three) -> None:
    tokens = prompt(600, 70)
    answers = {image: engines.plain.generate([tokens], image=(image, None))[0] for image in (2, 3)}
    assert answers[2] != answers[3]
    for image in (2, 3):
        assert again(engines.first, tokens, image=(image, None)) == (answers[image], 0)
    for engine in (engines.second, engines.first):
        for image in (2, 3):
            assert again(engine, tokens, image=(image, None)) == (answers[image], 768)


def test_text_that_equals_the_places_of_an_image(engines: Three) -> None:
    """Text that equals the places of an image shares nothing with it."""
    text = [TINY.vocabulary - 1] * QUERIES + prompt(600, 71)
    expected = engines.plain.generate([text])[0]
    again(engines.first, prompt(600, 71), image=(4, None))
    assert again(engines.first, text) == (expected, 0)
    assert again(engines.second, text) == (expected, 768)


def test_an_image_with_a_name_of_the_client(engines: Three) -> None:
    """The same name may stand for another image elsewhere."""
    tokens = prompt(600, 72)
    for engine, image in ((engines.first, 1), (engines.second, 2)):
        before = engine.call("counts")["requests_not_served"]
        expected = engines.plain.generate([tokens], image=(image, None))[0]
        assert again(engine, tokens, image=(image, "my image")) == (expected, 0)
        assert engine.call("counts")["requests_not_served"] == before + 1
        assert "multi_modal_uuids" in refusals(engine)[-1]
