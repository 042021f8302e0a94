"""Seed mistakes into shipped configs: each is one line and exit code 2, or a run, no traceback."""

import random
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from data_prep.config import CorpusConfig
from launch.config import ConfigError, load_config
from launch.recipe_config import Recipe
from pretrain.config import RunConfig

pytestmark = pytest.mark.slow

SHIPPED = sorted((Path(__file__).parents[2] / "configs").glob("*.yaml"))
RECIPES = [path for path in SHIPPED if "\nruns:" in path.read_text(encoding="utf-8")]
MUTATIONS, RUNS = 400, 25
ODD = [
    *("0", "-1", "010", "1e-6", "1e999", ".inf", ".nan", "1:30", "0x10", "1_000", "9" * 5000),
    *("true", "no", "null", "~", "''", "2024-13-45", "2024-01-01", "!!int x", "!!binary YQ=="),
    *("[]", "{}", "[1, 2]", "{a: 1}", "[[[[]]]]", "[" * 500, "{a: " * 500, "&x 1", "*x", "<<"),
    *('"\\0"', '"\\ud800"', '"\\x1b[2J"', "\u202e", "|", ">", "%", "@", "`", "- ", "? ", ": "),
    *("all", "masked", "random", "teacher", "uniform", "smoothed", "auto", "fp16", "a" * 5000),
]  # fmt: skip


def mutations(seed: int, num: int) -> Iterator[tuple[Path, str]]:
    """Return configs of which one to three places were changed."""
    draw = random.Random(seed)
    for count in range(num):
        path = SHIPPED[count % len(SHIPPED)]
        lines = [s for s in path.read_text(encoding="utf-8").split("\n") if s[:1] not in ("#", "")]
        for _ in range(draw.randint(1, 3)):
            number = draw.randrange(len(lines))
            line = lines[number]
            # A scalar: what follows a colon, a comma or a bracket.
            places = list(re.finditer(r"(?<=[:\[,] )[^,{}\[\]\n]+|(?<=\[)[^,{}\[\]]+", line))
            kind = draw.randrange(6)
            if kind <= 2 and places:
                place = draw.choice(places)
                lines[number] = line[: place.start()] + draw.choice(ODD) + line[place.end() :]
            elif kind == 3:
                at = draw.randrange(len(line) + 1)
                character = chr(draw.choice([0, 9, 27, 58, 91, 123, 0x202E, 0x2028]))
                lines[number] = line[:at] + character + line[at:]
            elif kind == 4:
                lines.insert(number, draw.choice(lines))
            elif len(lines) > 1:
                del lines[number]
        yield path, "\n".join(lines) + "\n"


@pytest.fixture(scope="module")
def accepted(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Path, str]]:
    """Return the mutated configs that load; assert that every other one is refused in a line."""
    folder = tmp_path_factory.mktemp("configs")
    found = []
    for path, text in mutations(seed=13, num=MUTATIONS):
        (folder / path.name).write_text(text, encoding="utf-8")
        model: Any = Recipe if path in RECIPES else RunConfig
        if path.name.startswith("corpus-"):
            model = CorpusConfig
        try:
            load_config(model, folder / path.name)
        except ConfigError as error:
            message = str(error)
            assert message.startswith(f"{folder / path.name}:") and len(message) < 1000, text
            assert all(c.isprintable() for c in message), text
        else:
            found.append((path, text))
    return found


def test_each_mutated_config_loads_or_is_refused_in_a_line(
    accepted: list[tuple[Path, str]],
) -> None:
    assert RUNS < len(accepted) < MUTATIONS - RUNS


def test_what_is_accepted_runs_or_is_refused_in_a_line(
    accepted: list[tuple[Path, str]],
    tmp_path: Path,
    shards: Path,
    monkeypatch: pytest.MonkeyPatch,
    distil: Any,
    save_teacher: Any,
) -> None:
    save_teacher(tmp_path / "teacher")
    (tmp_path / "text.txt").write_text("one text\n\nanother text\n" * 50, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    ended: Counter[int] = Counter()
    for number, (path, text) in enumerate(accepted[:RUNS]):
        (tmp_path / "config.yaml").write_text(text, encoding="utf-8")
        output = f"output={tmp_path}/out-{number}"
        source = f"{{kind: text, path: {tmp_path}/text.txt, document: paragraph}}"
        corpus = [f"sources=[{source}]", f"tokenizer={shards.parent}/vocab.txt", "workers=1"]
        if "name: mlm" in text:
            run = ["model={hidden_size: 16, num_hidden_layers: 1, num_attention_heads: 2}"]
        else:
            run = ["student={num_layers: 1}", f"teacher={tmp_path}/teacher"]
        run += [f"shards={shards}", "evaluation.rows=4", "train.num_workers=0"]
        run += ["train.max_steps=2", "train.global_batch_size=4", "train.micro_batch_size=2"]
        kind, tiny = ("prepare", corpus) if path.name.startswith("corpus-") else ("pretrain", run)
        if path in RECIPES:  # their runs are whole configs: what they are checked for is shown
            kind, output, tiny = "recipe", "--dry-run", []
        code, _, said = distil(kind, "config.yaml", output, *tiny)
        ended[code] += 1
        errors = [line for line in said.splitlines() if line.startswith("error: ")]
        assert code in (0, 2, 3) and "Traceback" not in said, (text, said)
        assert len(errors) == (code != 0), (text, said)
    assert ended[0] > RUNS // 4, ended
