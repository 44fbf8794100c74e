"""`python -m tests.stories` writes the stories anew."""

from tests.stories.test_stories import FOLDER, SCENES, text

for name in SCENES:
    (FOLDER / f"{name}.txt").write_text(text(name))
