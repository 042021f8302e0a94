"""Pin the answers to mistakes that new users made: the key, what is wrong, and the fix."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.small_corpora import LETTERS, write

# Of each: the file, what the user typed after it, and parts of the answer.
SAME = "student.architecture=same"
MISTAKES = [
    ("run", "objective=minilm", "write objective.name=minilm", "`objective: {name: minilm}`"),
    (
        "run",
        "objective={name: minilm, temperature: 2}",
        "objective minilm has no temperature (distilbert, kd and pkd have)",
        "version, relation_heads, teacher_layer",
    ),
    (
        "run",
        "objective={name: embedding, pooling: cls}",
        "unknown key objective.pooling: objective embedding has no pooling",
        "its keys are cosine, similarity, mse, adapter",
    ),
    ("run", "objective={name:minilm}", "YAML needs a space after the colon"),
    ("mlm", "model={init: other}", "model.init other", "other tokens or ids than the shards'"),
    ("mlm", "model=other", "write model.init=other"),
    ("run", "keep_text=true", "key of the corpus: distil prepare CORPUS keep_text="),
    ("run", "masking.probability=[0.3]", "masking.probability: give one share", "or two"),
    ("run", "masking.probability=30", "masking.probability: give one share", "(given: 30)"),
    (
        "run",
        "objective.name=minilm masking.mode=whole_word",
        "masking.mode: objective minilm masks nothing: remove it",
    ),
    (
        "run",
        "objective.name=embedding masking.mode=whole_word",
        "masking.mode: objective",
    ),
    ("mlm", "student.dropout=0.1", "student: objective mlm has no teacher: remove it"),
    ("recipe as run", "", "recipe.yaml: this is a recipe: distil recipe recipe.yaml"),
    ("run as recipe", "", "run.yaml: this is one run: distil pretrain run.yaml"),
    ("recipe as corpus", "", "recipe.yaml: this is a recipe: distil recipe recipe.yaml"),
    (
        "recipe",
        "runs.0.teacher=runs/b --dry-run",
        "run 1 needs teacher runs/b, which run 2 makes: put that one first",
    ),
    (
        "recipe",
        "runs.0.teacher=runs/c --dry-run",
        "run 1 needs teacher runs/c, which is not there and which no run makes",
    ),
    ("recipe", "train.seed=1", "defaults.train.seed for all runs, or runs.0.train.seed"),
    ("recipe", "objective.kl=0", "defaults.objective.kl for all runs, or runs.0.objective.kl"),
    (
        "recipe",
        "defaults.masking.mode=whole_word defaults.objective.name=minilm",
        "defaults.masking.mode",
    ),
    (
        "run",
        f"objective.name=minilm {SAME} objective.relation_heads=7",
        "objective.relation_heads 7: does not divide the student's width 16",
        "4, 8 or 16",
    ),
    ("run", "objective.kl=0 objective.mlm=0 objective.cosine=0", "give one of kl, mlm, cosine"),
    (
        "run",
        "student.init=random student.hidden_size=17",
        "student.hidden_size 17: is not a multiple of the student's 2 heads",
    ),
    ("run", "objective.name=mlm", "objective mlm has no teacher: remove teacher"),
    (
        "run",
        "student.architecture=bert",
        "student.architecture: must be 'distilbert', 'same' or 'bilstm' (given: 'bert')",
    ),
    (
        "mlm",
        "model={init: teacher, num_hidden_layers: 1}",
        "num_hidden_layers cannot be set with init",
        "For fewer layers use `teacher: NAME`",
    ),
    (
        "mlm",
        "model={init: nobody}",
        "model.init nobody: no such folder here, and the hub cannot be reached",
    ),
    (
        "run",
        f"objective.name=embedding {SAME} teacher=other",
        "prepare the corpus with its tokenizer, or with keep_text: true, and give `model:`",
    ),
    (
        "run",
        f"objective.name=embedding {SAME} vectors=v.npy",
        "vectors v.npy: is not a safetensors file",
        "name another file in `vectors:`, which is then written",
    ),
    ("corpus", "tokenizer={train: {normalization: NFC}}", "must be 'none', 'nfc' or 'nfkc'"),
    ("run", "output=", "output: must be a path"),
    ("run", "resume_from=x", "key resume_from is gone in this version: remove it"),
    ("run", "objective.name=embedding vectors=", "vectors is empty, as of an unset variable"),
    ("run", "objective.name=minilm objective.version=true", "objective.version: must be 1 or 2"),
    ("run", "optimizer.learning_rate=1e-300", "learning_rate 1e-300 is too small"),
    ("run", "optimizer.max_grad_norm=1e-300", "max_grad_norm 1e-300 is too small"),
    ("run", "masking.probability=1e-300", "probability 1e-300 is too small"),
    ("run", "objective.name=minilm student.num_layers=3", "student.num_layers 3 is more than"),
    ("run", "objective.name=KD", "did you mean kd?"),
    ("run", "logging.wandb=true", "logging.wandb: write logging.trackers=[wandb]"),
    ("recipe", "runs.1.sweep={seed: [0, 1]}", "sweep.seed: no key of a run: write train.seed"),
    ("data", "validation=10", "validation: give a share below 1, such as 0.1, or a file"),
    ("data", "validation=10%", "validation: give a share below 1, such as 0.1, or a file"),
    ("data", "validation=two.csv train=one.csv", "1 label(s) in 'label'", "more examples"),
    ("data", f"task.labels=[{', '.join(f'l{i}' for i in range(2000))}]", "2,000 labels, such as"),
    ("both", "", "sources are of a corpus, and task", "remove one of the two"),
    ("task", "task.name=regression", "a run of such data has name: classification"),
    ("task", "model.num_hidden_layers=1", "`teacher: NAME` with student.num_layers", "kd, soft: 0"),
    ("task", "objective.hard=0.5", "objective finetune has no hard", "its keys are none but name"),
]


@pytest.fixture
def folder(
    tmp_path: Path,
    shards: Path,
    run_values: dict[str, Any],
    save_teacher: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
) -> Path:
    monkeypatch.chdir(tmp_path)
    save_teacher(tmp_path / "teacher")
    save_teacher(tmp_path / "other", [*LETTERS[:5], *reversed(LETTERS[5:])])
    (tmp_path / "v.npy").write_bytes(b"\x93NUMPY\x01\x00v\x00{'descr': '<f2'}")
    write(tmp_path / "mlm.yaml", {"output": "runs/m", **run_values, "model": {}})
    kept = {key: run_values[key] for key in ("shards", "train", "evaluation")}
    kept["teacher_vocabulary"] = "same"
    write(tmp_path / "run.yaml", {"output": "runs/x", "teacher": "teacher", **kept})
    runs = [{"output": "runs/a", "teacher": "teacher"}, {"output": "runs/b", "teacher": "runs/a"}]
    write(tmp_path / "recipe.yaml", {"defaults": kept, "runs": runs})
    source = {"kind": "text", "path": "letters.txt"}
    write(tmp_path / "corpus.yaml", {"output": "out", "sources": [source]})
    for name, labels in (("two", "ab"), ("one", "a")):
        rows = "".join(f"{a} b {i},{a}\n" for i in range(4) for a in labels)
        (tmp_path / f"{name}.csv").write_text(f"text,label\n{rows}")
    task = {"name": "classification", "text": "text", "label": "label"}
    data = {"output": "data", "task": task, "train": "two.csv", "validation": 0.25}
    data |= {"tokenizer": "teacher", "max_length": 16}
    write(tmp_path / "data.yaml", data)
    write(tmp_path / "both.yaml", {**data, "sources": [source]})
    tuned = {"objective": {"name": "finetune"}, "model": {"init": "teacher"}}
    task = {"name": "classification"}
    write(tmp_path / "task.yaml", {"output": "runs/t", "task": task, **tuned, **kept})
    return tmp_path


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("launch run.yaml --slurm --time 1:00:00", "slurm.time=1:00:00"),
        ("launch run.yaml --hardware 32xh100", "so many are --nodes 4 --hardware 8xh100"),
        ("pretrain run.yaml --resume", "the same command continues"),
        ("export runs/x exported --quantize", "--int8"),
        ("publish runs/x", "distil export RUN DIR --push OWNER/NAME"),
        ("config keys trian", "did you mean train?"),
    ],
)
def test_a_word_that_has_another_name_is_answered_with_it(
    distil: Callable[..., Any], folder: Path, typed: str, meant: str
) -> None:
    code, _, said = distil(*typed.split())
    assert code == 2 and meant in said, said


@pytest.mark.parametrize("case", MISTAKES, ids=lambda case: f"{case[0]} {case[1]}"[:60])
def test_a_mistake_is_answered_with_its_key_and_its_fix(
    distil: Callable[..., Any], folder: Path, case: tuple[str, ...]
) -> None:
    file, typed, *parts = case
    file, _, command = file.partition(" as ")
    command = {"recipe": "recipe", "corpus": "prepare", "data": "prepare", "both": "prepare"}.get(
        command or file, "pretrain"
    )
    # Values hold spaces; a new argument begins with a key or with --.
    words: list[str] = []
    for word in typed.split():
        begins = word.startswith("--") or ("=" in word and "{" not in word.partition("=")[0])
        words += [word] if begins else []
        words[-1:] = words[-1:] if begins else [f"{words[-1]} {word}"]
    code, _, said = distil(command, f"{file}.yaml", *words)
    (error,) = [line for line in said.splitlines() if line.startswith("error: ")]
    assert code == 2 and all(part in error for part in parts), error
    assert len(error) < 450 and "Traceback" not in said
    for phantom in ("more)", "nput should", "valid dictionary", "remove it to write"):
        assert phantom not in error
    assert not list(folder.glob("runs/*/c*"))  # config.json and checkpoints


def test_a_length_that_is_given_twice_or_is_short_is_noted(
    distil: Callable[..., Any], folder: Path
) -> None:
    arguments = ["train.max_steps=4", "train.epochs=3", "train.global_batch_size=8"]
    code, out, _ = distil("pretrain", "run.yaml", *arguments, "--dry-run")
    assert code == 0 and not (folder / "runs").exists()
    assert "teacher: bert, 2 layers x 16, 2 heads\nstudent: distilbert, 1 layers x 16" in out
    assert "note: max_steps 4 is 0.1" in out and "epochs: 3 is not used" in out
    assert "warning: 4 optimizer steps, and most models need hundreds: set train.max_steps" in out
    assert "of the corpus is read: for all of its" in out


def test_defaults_of_a_recipe_reach_the_runs_that_read_them(
    distil: Callable[..., Any], folder: Path
) -> None:
    mlm = (
        "{output: runs/m, objective: {name: mlm}, model: {hidden_size: 16, num_attention_heads: 2}}"
    )
    arguments = [f"runs.1={mlm}", "defaults.teacher=teacher", "defaults.student.dropout=0"]
    code, out, said = distil("recipe", "recipe.yaml", *arguments, "--dry-run")
    assert code == 0 and out.count("student: ") == 2 and out.count("teacher: ") == 1, said
