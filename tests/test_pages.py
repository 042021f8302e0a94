"""Run the manual's page on a language of one's own: its file and its commands, at tiny size."""

from __future__ import annotations

import bz2
import random
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import AutoTokenizer, pipeline

PAGE = Path(__file__).parents[1] / "docs" / "own-language.md"
DUMP = "dewiki-latest-pages-articles-multistream.xml.bz2"
SENTENCES = (
    "Die Hauptstadt von Österreich ist seit Jahrhunderten die schöne Stadt Wien an der Donau.",
    "In den Bäumen sitzen die Vögel, und über den Häusern ziehen weiße Wolken nach Süden.",
    "Der Fluss führt im Frühling viel Wasser, weil der Schnee in den Bergen schmilzt.",
    "Zwölf Boxkämpfer jagen den großen Sylter Deichgrafen über den müden Hafen.",
)


def write_dump(folder: Path) -> None:
    """Write a dump of 120 articles, each of 30 sentences in an order of its own."""
    draw = random.Random(0)
    pages = "".join(
        f"<page><title>Seite {i}</title><ns>0</ns><id>{i}</id><revision><id>{i}</id><text>"
        f"{' '.join(draw.choices(SENTENCES, k=30))} Nummer {draw.randrange(10**6)}."
        "</text></revision></page>\n"
        for i in range(1, 121)
    )
    text = f"<mediawiki xml:lang='de'>\n{pages}</mediawiki>\n"
    (folder / DUMP).write_bytes(bz2.compress(text.encode()))


@pytest.mark.slow
def test_the_page_on_a_language_leads_to_a_model(
    tmp_path: Path, distil: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_dump(tmp_path)
    page = PAGE.read_text(encoding="utf-8")
    (text,) = re.findall(r"```yaml\n# de\.yaml\n(.*?)```", page, re.DOTALL)
    values = yaml.safe_load(text)
    corpus, teacher, student, *_ = values["runs"]
    assert corpus["sources"][0]["path"] == DUMP
    corpus["tokenizer"]["train"]["vocab_size"] = 300
    corpus["deduplicate"] = {"documents": "exact"}  # few sentences: all articles are alike
    corpus |= {"row_length": 32, "validation": 0.1}
    teacher["model"] |= {"hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 64}
    teacher["model"] |= {"num_attention_heads": 2, "max_position_embeddings": 32}
    student["student"]["num_layers"] = 1
    values["defaults"]["train"] = {"max_steps": 4, "global_batch_size": 8, "precision": "fp32"}
    values["defaults"]["evaluation"]["rows"] = 16
    Path("de.yaml").write_text(yaml.safe_dump(values, sort_keys=False), encoding="utf-8")
    blocks = "".join(re.findall(r"```bash\n(.*?)```", page, re.DOTALL))
    commands = [shlex.split(line, comments=True)[1:] for line in blocks.splitlines()]
    assert len(commands) == 6
    for command in commands:
        tiny = ["--max-drop", "0.5"] if "--int8" in command else []
        code, out, err = distil(*command, *tiny)
        assert code == 0, f"{command}: {out}{err}"
    tokens = AutoTokenizer.from_pretrained("exported/de").tokenize("Österreich über weiße Häuser")
    assert "[UNK]" not in tokens and set("Öüßä") <= set("".join(tokens))
    fill = pipeline("fill-mask", model="exported/de")
    assert len(fill("Die Hauptstadt von Österreich ist [MASK].")) == 5
    card = Path("exported/de/README.md").read_text(encoding="utf-8")
    assert "license: cc-by-sa-4.0" in card and "Die Hauptstadt von Österreich" in card
    assert Path("exported/de-int8/onnx/model_quantized.onnx").is_file()
