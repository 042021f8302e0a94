"""Cut Wikipedia articles into sentences."""

from pathlib import Path

from benchmarks.sentences import sentences

ARTICLE = """<doc id="1" url="http://x" title="Bees">
Bees

Bees are insects that fly. They make honey in hives! Is honey sweet to the taste? No.
Anatomy.
A bee has (as any insect) six legs, e.g. two in front. And this one has no end
</doc>
"""


def test_sentences_are_whole_and_neither_short_nor_headings(tmp_path: Path) -> None:
    (tmp_path / "AA").mkdir()
    (tmp_path / "AA" / "wiki_00").write_text(ARTICLE + ARTICLE.replace('id="1"', 'id="2"'))
    expected = [
        "Bees are insects that fly.",
        "They make honey in hives!",
        "Is honey sweet to the taste?",
        "A bee has (as any insect) six legs, e.g. two in front.",
    ]
    assert list(sentences(tmp_path)) == 2 * expected
