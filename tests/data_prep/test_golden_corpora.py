"""Check each stage's bytes for five small corpora; they change only with its `behaviour`.

`tests/golden/corpora.json` holds them, and the libraries they were made with. After a change that
is meant, raise the stage's number in data_prep/pipeline/code.py and renew the file:
`python -m tests.data_prep.test_golden_corpora`.
"""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from data_prep.config import CorpusConfig
from data_prep.disk.json_files import canonical_sha256
from data_prep.pipeline.code import BEHAVIOUR, code_of
from data_prep.prepare import prepare

GOLDEN = Path(__file__).parents[1] / "golden" / "corpora.json"
RENEW = "python -m tests.data_prep.test_golden_corpora"
TEXT = (
    "the of and river town was built in old stone by people who came from a far land to trade "
    "wool salt iron books Z\u00fcrich na\u00efve caf\u00e9 1914 they lived near water until war"
)
WORDS = TEXT.split()
LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789"
VOCABULARY = [
    *("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", ".", ",", "(", ")", "-", '"', "the", "river"),
    *LETTERS,
    *(f"##{letter}" for letter in LETTERS),
]
HEAD = (
    '<mediawiki xmlns="http://www.mediawiki.org/xml/export-0.11/" xml:lang="en"><siteinfo>'
    "<base>https://en.wikipedia.org/wiki/Main_Page</base><namespaces>"
    '<namespace key="6">File</namespace></namespaces></siteinfo>\n'
)


def sentence(number: int, words: int = 14) -> str:
    """Return a sentence that depends on its number and on nothing else."""
    chosen = [WORDS[(number * 7 + i * i + i * number) % len(WORDS)] for i in range(words)]
    return " ".join(chosen).capitalize() + "."


def paragraph(number: int) -> str:
    return " ".join(sentence(number * 5 + i) for i in range(4))


def mediawiki(folder: Path) -> dict[str, Any]:
    pages = []
    for number in range(12):
        markup = (
            f"{{{{Infobox town|name=T{number}}}}}\n'''Town {number}''' is [[river|a place]]"
            f"&lt;ref&gt;note&lt;/ref&gt;. {paragraph(number)}\n\n== History ==\n"
            f"[[File:x.png|thumb|A picture]]{paragraph(number + 20)}\n* one\n* two\n\n"
            f"{{| class=wikitable\n| cell\n|}}\n{paragraph(number + 40)}\n[[Category:Towns]]"
        )
        redirect = '<redirect title="Town 1"/>' if number == 5 else ""
        pages.append(
            f"<page><title>Town {number}</title><ns>{4 if number == 7 else 0}</ns>"
            f"<id>{number}</id>{redirect}<revision><id>9{number}</id><text>{markup}</text>"
            "</revision></page>\n"
        )
    (folder / "w.xml").write_text(f"{HEAD}{''.join(pages)}</mediawiki>\n", encoding="utf-8")
    return {"sources": [{"kind": "mediawiki", "path": str(folder / "w.xml")}]}


def books(folder: Path) -> dict[str, Any]:
    for number in range(5):
        wrapped = paragraph(number).replace(" and ", "\nand ")
        text = (
            f"The Project Gutenberg EBook of Book {number}\n\nTitle: Book {number}\n\n"
            f"*** START OF THIS PROJECT GUTENBERG EBOOK BOOK {number} ***\n\n"
            f"Produced by Someone\n\nCHAPTER I\n\n{wrapped}\n\n"
            f"[Illustration: a boat]\n\n_{sentence(number)}_ [Pg 12]\n\n"
            + "\n\n".join(paragraph(number * 10 + i) for i in range(6))
            + f"\n\n*** END OF THIS PROJECT GUTENBERG EBOOK BOOK {number} ***\n\nLicence\n"
        )
        encoding = "cp1252" if number == 2 else "utf-8"
        (folder / f"{number}.txt").write_bytes(text.encode(encoding))
    return {"sources": [{"kind": "books", "path": str(folder)}], "validation": 0.3}


def jsonl(folder: Path) -> dict[str, Any]:
    texts = [f"{paragraph(i)}\n{paragraph(i + 1)}\n{paragraph(i + 2)}" for i in range(30)]
    texts += [texts[3], texts[4].replace("river", "stream", 1), " ", "\u200bjoined\u00a0spaces\t"]
    lines = [json.dumps({"text": text, "id": i, "url": f"u/{i}"}) for i, text in enumerate(texts)]
    (folder / "t.jsonl").write_text("\n".join([*lines, "{broken", '{"no": "text"}']) + "\n")
    (folder / "dev.tsv").write_text(f"text\tlabel\n{sentence(35)}\t1\n", encoding="utf-8")
    source = {"kind": "jsonl", "path": str(folder / "t.jsonl"), "id_field": "id"}
    return {
        "sources": [source | {"url_field": "url", "languages": ["en"], "fraction": 0.9}],
        "deduplicate": {"documents": "near", "paragraphs": "exact"},
        "decontaminate": {"files": [str(folder / "dev.tsv")], "remove": True},
        "row_length": 64,
    }


def trained_vocabulary(folder: Path) -> dict[str, Any]:
    (folder / "t.txt").write_text("\n".join(paragraph(i) for i in range(60)), encoding="utf-8")
    return {
        "sources": [{"kind": "text", "path": str(folder / "t.txt"), "document": "line"}],
        "tokenizer": {"train": {"vocab_size": 150}},
    }


def kept_texts(folder: Path) -> dict[str, Any]:
    return jsonl(folder) | {"keep_text": True}


CORPORA = {
    make.__name__: make for make in (mediawiki, books, jsonl, trained_vocabulary, kept_texts)
}


def digests(name: str, folder: Path) -> dict[str, str]:
    """Return each stage's hash of its files; of `finish`, that of shards and token counts."""
    (folder / "in").mkdir()
    (folder / "vocab.txt").write_text("\n".join(VOCABULARY) + "\n")
    values: dict[str, Any] = {
        "output": folder / "out",
        "tokenizer": str(folder / "vocab.txt"),
        "row_length": 32,
        "validation": 0.2,
        "workers": 1,
    }
    config = CorpusConfig.model_validate(values | CORPORA[name](folder / "in"))
    manifest = prepare(config, part_bytes=8_000, piece_bytes=3_000)
    written: dict[str, list[Any]] = {stage: [] for stage in BEHAVIOUR}
    for line in (config.output / "provenance.jsonl").read_text().splitlines():
        unit = json.loads(line)
        written[unit["stage"]] += [[output["file"], output["sha256"]] for output in unit["outputs"]]
    for file in manifest.files:
        if file.file == "token_counts.json":
            written["finish"].append([file.file, file.sha256])
    for split, record in sorted(manifest.splits.items()):
        written["finish"] += [[split, shard.sha256] for shard in record.shards]
    return {stage: canonical_sha256(files) for stage, files in written.items() if files}


def problem(golden: dict[str, Any], name: str, found: dict[str, str]) -> str:
    """Return the fault in the bytes of one corpus as a sentence; "" if there is none."""
    expected = golden["corpora"].get(name, {})
    changed = [stage for stage in BEHAVIOUR if found.get(stage) != expected.get(stage)]
    if not changed:
        return ""
    stage = changed[0]  # the others may only follow from it
    here = code_of("finish").libraries
    there = golden["libraries"]
    libraries = [
        f"{library} {there.get(library)} there, {here.get(library)} here"
        for library in sorted(there.keys() | here.keys())
        if there.get(library) != here.get(library)
    ]
    text = f"corpus {name}: stage {stage} writes other bytes than {GOLDEN.name} says"
    if libraries:
        text += f"; other library versions may be why ({'; '.join(libraries)})"
    if BEHAVIOUR[stage] > golden["behaviour"].get(stage, 0):
        return f"{text}: its behaviour was raised, so renew the file: {RENEW}"
    return (
        f"{text}, and its behaviour is still {BEHAVIOUR[stage]}: if that is meant, raise it in "
        f"data_prep/pipeline/code.py, then {RENEW}"
    )


@pytest.mark.parametrize("name", list(CORPORA))
def test_bytes_change_only_with_the_behaviour(tmp_path: Path, name: str) -> None:
    golden = json.loads(GOLDEN.read_text(encoding="utf-8"))
    if (there := golden["libraries"]["python"]) != (here := code_of("finish").libraries["python"]):
        pytest.skip(f"they are the bytes of Python {there}'s libraries, and this is {here}")
    found = digests(name, tmp_path)
    assert not (text := problem(golden, name, found)), text
    # What the test must notice, and what it says.
    other = found | {"match": "0" * 64, "pack": "0" * 64}
    assert "stage match writes other bytes" in problem(golden, name, other)
    assert f"behaviour is still {BEHAVIOUR['match']}" in problem(golden, name, other)
    lower = golden | {"behaviour": golden["behaviour"] | {"match": 0}}
    assert "was raised, so renew" in problem(lower, name, other)
    older = golden | {"libraries": golden["libraries"] | {"numpy": "1.0"}}
    assert "numpy 1.0 there" in problem(older, name, other)


def test_the_golden_file_is_of_this_behaviour() -> None:
    golden = json.loads(GOLDEN.read_text(encoding="utf-8"))
    assert golden["behaviour"] == BEHAVIOUR, f"renew {GOLDEN.name}: {RENEW}"


if __name__ == "__main__":
    corpora = {}
    for corpus in CORPORA:
        with tempfile.TemporaryDirectory() as name:
            corpora[corpus] = digests(corpus, Path(name))
        if GOLDEN.exists():
            old = json.loads(GOLDEN.read_text(encoding="utf-8"))
            new = corpus not in old["corpora"]
            text = "" if new else problem(old, corpus, corpora[corpus])
            if "behaviour is still" in text and "library versions" not in text:
                sys.exit(text)
    libraries = code_of("finish").libraries
    values = {"behaviour": BEHAVIOUR, "libraries": libraries, "corpora": corpora}
    GOLDEN.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
