"""Run the short files of the guide, and its Python lines, on tiny models and a tiny corpus."""

import re
from pathlib import Path
from typing import Any

import pytest
from sentence_transformers import SentenceTransformer
from support.tiny import VOCABULARY
from transformers import AutoTokenizer

ROOT = Path(__file__).parents[2]


def blocks(language: str) -> list[str]:
    """Return the blocks of a language among the guide's short files."""
    text = (ROOT / "docs" / "guide.md").read_text(encoding="utf-8")
    text = text[text.index("## Short files") : text.index("## One stage")]
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def test_every_short_file_and_line_of_the_guide_runs(
    tmp_path: Path, teacher_folder: Path, distil: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(teacher_folder)
    tokenizer.save_pretrained(teacher_folder)
    (tmp_path / "texts").mkdir()
    paragraphs = [" ".join(VOCABULARY[5 + i : 15 + i]) for i in range(180)]
    (tmp_path / "texts" / "a.txt").write_text("\n\n".join(paragraphs), encoding="utf-8")
    # The same files with a tiny teacher, short rows and few steps.
    smaller = {
        r"sentence-transformers/all-MiniLM-L6-v2|bert-base-uncased": str(teacher_folder),
        r"row_length: \d+": "row_length: 32",
        r"num_layers: \d+": "num_layers: 2",
        r"epochs: 1(, global_batch_size: \d+)?": "max_steps: 2, global_batch_size: 4",
        r"\bminilm\}": "minilm, relation_heads: 8}",
        r"validation: 0.01": "validation: 0.2",
    }
    files = {}
    for block in blocks("yaml"):
        name = re.match(r"# (\w+\.yaml)\n", block)
        assert name is not None and len(block.splitlines()) <= 8
        for pattern, value in smaller.items():
            block = re.sub(pattern, value, block)
        files[name[1]] = block
        (tmp_path / name[1]).write_text(block, encoding="utf-8")
    assert list(files) == ["corpus.yaml", "small.yaml", "domain.yaml", "papers.yaml"]
    guide = (ROOT / "docs" / "guide.md").read_text(encoding="utf-8")
    for command, name in (
        ("prepare", "corpus.yaml"),
        ("pretrain", "small.yaml"),
        ("recipe", "domain.yaml"),
        ("recipe", "papers.yaml"),
    ):
        assert f"`distil {command} {name}`" in guide
        code, out, error = distil(command, name)
        assert code == 0, out + error
    for run in ("small", "teacher", "student", "distilbert", "minilm", "tinybert"):
        assert distil("export", f"runs/{run}", f"exported/{run}").code == 0
    runs = ["runs/distilbert", "runs/minilm", "runs/tinybert"]
    shown = distil("evaluate", *runs, "--data", "shards/mine", "--teacher", teacher_folder)
    assert shown.code == 0 and all(f" {Path(run).name} " in shown.out for run in runs)
    (lines,) = blocks("python")
    names: dict[str, Any] = {"tokenizer": tokenizer}
    exec(lines.replace("max_steps=100", "max_steps=2"), names)
    texts = ["one text", "another text"]
    assert names["run"].ended == "up to date" and names["vectors"].shape == (2, 32)
    sentences = SentenceTransformer("exported/small", device="cpu")
    loaded = sentences.encode(texts, normalize_embeddings=True)
    assert names["vectors"] == pytest.approx(loaded, abs=1e-5)
    assert names["cosines"][0, 1] == pytest.approx(loaded[0] @ loaded[1], abs=1e-5)
    assert set(names["collator"]([tokenizer("a b")])) == {"input_ids", "attention_mask", "labels"}
