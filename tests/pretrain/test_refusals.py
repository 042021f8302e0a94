"""Check that inputs that do not fit are refused before step 0, in one line with the fix.

A refusal writes nothing and changes nothing.
"""

from __future__ import annotations

import hashlib
import json
import operator
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial, reduce
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.runs import RECIPE, case_name, refused, reseal_checkpoint, start, step_folder
from support.tiny import save_teacher, tiny_bert, tiny_distilbert
from support.traps import edit
from tokenizers import Tokenizer, models
from torch import Tensor
from transformers import (
    AlbertConfig,
    AlbertForMaskedLM,
    BertForMaskedLM,
    DistilBertForMaskedLM,
)

import pretrain.train
from data_prep import CorpusError
from data_prep.disk.json_files import canonical_sha256
from data_prep.shards import load_manifest, open_shards, write_shard
from data_prep.shards import manifest as shards_manifest
from data_prep.shards.manifest import manifest_bytes, seal
from pretrain import RunError
from pretrain.model.folder import load_model

Values = dict[str, Any]
LOCKS = (".lock", "lock")  # who is at work: of the start, not of the run


@dataclass
class Place:
    """Hold a folder with a teacher, a student to continue from, and a run over the tiny corpus."""

    folder: Path
    corpus: Path
    words: list[str]
    bert: Callable[..., BertForMaskedLM]
    distilbert: Callable[..., DistilBertForMaskedLM]
    save_teacher: Callable[..., BertForMaskedLM]
    values: Values

    @property
    def teacher(self) -> Path:
        return self.folder / "teacher"

    @property
    def output(self) -> Path:
        return Path(self.values["output"])

    def own_shards(self) -> Path:
        """Copy the corpus, so that a test may change it; the run reads the copy."""
        shards = self.folder / "shards"
        shutil.copytree(self.corpus, shards, dirs_exist_ok=True)
        self.values["shards"] = str(shards)
        return shards

    def checkpoint(self, step: int = 2) -> Path:
        return step_folder(self.output, step)

    def student(self, words: list[str] | None = None, **changes: Any) -> Path:
        """Save a DistilBERT with a vocabulary, from which the run continues."""
        folder = self.folder / "student"
        self.distilbert(2).save_pretrained(folder)
        (folder / "vocab.txt").write_text("\n".join(words or self.words) + "\n", encoding="utf-8")
        edit(folder / "config.json", **changes)
        self.values["student"]["init"] = str(folder)
        return folder

    def files(self) -> dict[str, str]:
        """Return the hashes of the run's files."""
        found = everything(self.output)
        return {name: hash for name, hash in found.items() if hash and not name.endswith(LOCKS)}


def everything(folder: Path) -> dict[str, str]:
    """Return every path below a folder, with a hash of each file."""
    return {
        str(path): hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
        for path in folder.rglob("*")
    }


@pytest.fixture
def place(tmp_path: Path, corpus: Path, vocabulary: list[str], run_config: Any) -> Place:
    save_teacher(tmp_path / "teacher")
    values = run_config(tmp_path / "run", tmp_path / "teacher", **RECIPE)
    return Place(tmp_path, corpus, vocabulary, tiny_bert, tiny_distilbert, save_teacher, values)


def assert_refused(place: Place, *parts: str) -> None:
    """Check for one line with all the parts, and for an unchanged folder of the run."""
    before = place.files()
    with refused(*parts, kind=(RunError, CorpusError)):
        start(place.values)
    assert place.files() == before


# --- the teacher's and the student's words ---------------------------------------------------


def swapped(words: list[str], one: int, other: int) -> list[str]:
    words = list(words)
    words[one], words[other] = words[other], words[one]
    return words


def teacher_words(place: Place, swap: tuple[int, int]) -> None:
    place.save_teacher(place.teacher, words=swapped(place.words, *swap))


def teacher_tokenizer_json_of_other_words(place: Place) -> None:
    (place.teacher / "vocab.txt").unlink()
    path = place.teacher / "tokenizer.json"
    shutil.copy(place.corpus / "tokenizer" / "tokenizer.json", path)
    model = json.loads(path.read_text(encoding="utf-8"))["model"]
    words = swapped(place.words, 7, 8)
    edit(path, model=model | {"vocab": {word: id for id, word in enumerate(words)}})


def teacher_pad_named_unk(place: Place) -> None:
    names = {"pad_token": {"content": "[UNK]", "lstrip": False}}
    (place.teacher / "special_tokens_map.json").write_text(json.dumps(names), encoding="utf-8")


def teacher_settings(place: Place, **changes: Any) -> None:
    edit(place.teacher / "tokenizer_config.json", **changes)


def teacher_config(place: Place, **changes: Any) -> None:
    edit(place.teacher / "config.json", **changes)


def small_teacher(place: Place, **sizes: int) -> None:
    """Save a teacher of one layer, with as many words as it says."""
    words = [*place.words, "more"][: sizes.get("vocab_size", 200)]
    place.save_teacher(place.teacher, place.bert(1, **sizes), words)


def teacher_without_tokenizer(place: Place) -> None:
    for name in ("vocab.txt", "tokenizer_config.json"):
        (place.teacher / name).unlink()


def teacher_whose_tokenizer_json_has_other_ids(place: Place) -> None:
    """Write another tokenizer.json, which transformers reads instead of vocab.txt."""
    ids = {word: id for id, word in enumerate(swapped(place.words, 7, 8))}
    tokenizer = Tokenizer(models.WordPiece(ids, unk_token="[UNK]"))
    tokenizer.save(str(place.teacher / "tokenizer.json"))


def student_without_tokenizer(place: Place) -> None:
    (place.student() / "vocab.txt").unlink()


def student_words_swapped(place: Place) -> None:
    place.student(swapped(place.words, 7, 8))


# --- shapes, heads and numbers ---------------------------------------------------------------


def mlm(place: Place, **sizes: int) -> None:
    del place.values["teacher"], place.values["student"]
    place.values["objective"] = {"name": "mlm"}
    model = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2}
    place.values["model"] = model | sizes


def student_with_few_positions(place: Place) -> None:
    folder = place.student(max_position_embeddings=31)
    change_weights(folder, lambda name, t: t[:31].clone() if "position_embeddings" in name else t)


def change_weights(folder: Path, change: Callable[[str, Tensor], Tensor | None]) -> None:
    """Rewrite model.safetensors; None leaves a tensor out."""
    path = folder / "model.safetensors"
    tensors = {name: change(name, tensor) for name, tensor in load_file(path).items()}
    kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    save_file(kept, path, metadata={"format": "pt"})


def teacher_is_an_albert(place: Place) -> None:
    sizes = {"hidden_size": 32, "embedding_size": 32, "num_attention_heads": 4}
    config = AlbertConfig(vocab_size=200, num_hidden_layers=1, **sizes)
    AlbertForMaskedLM(config).save_pretrained(place.teacher)


def teacher_without_head(place: Place) -> None:
    change_weights(place.teacher, lambda name, t: None if "cls.predictions" in name else t)


def teacher_in_int8(place: Place) -> None:
    change_weights(place.teacher, lambda name, t: (100 * t).to(torch.int8))


def student_is_wider(place: Place) -> None:
    place.distilbert(2, width=48).save_pretrained(place.student())


def student_without_head(place: Place) -> None:
    folder = place.student()
    change_weights(folder, lambda name, t: None if name.startswith("vocab_") else t)


def student_is_a_bert(place: Place) -> None:
    place.bert(2).save_pretrained(place.student())


# --- shards -------------------------------------------------------------------------------------


def forged_manifest(place: Place, key: str, value: Any) -> None:
    """Change a value of manifest.json and both of its hashes; `seal` itself refuses such values."""
    path = place.own_shards() / "manifest.json"
    values = json.loads(path.read_text(encoding="utf-8"))
    *sections, last = key.split(".")
    reduce(operator.getitem, sections, values)[last] = value
    values["digest"] = shards_manifest._digest(values)
    del values["self_sha256"]
    values["self_sha256"] = canonical_sha256(values)
    path.write_text(json.dumps(values), encoding="utf-8")


def rewrite_rows(place: Place, change: Callable[[Any], None]) -> None:
    """Change the training rows, and describe them correctly."""
    shards = place.own_shards()
    values = load_manifest(shards).model_dump(mode="json")
    train = values["splits"]["train"]
    rows = open_shards(shards).rows(np.arange(train["rows"]))
    change(rows)
    for shard in train["shards"]:
        (shards / shard["file"]).unlink()
    record = write_shard(shards / train["shards"][0]["file"], rows, pad=0)
    train |= {"shards": [record.model_dump(mode="json")], "tokens": record.tokens}
    del values["digest"], values["self_sha256"]
    (shards / "manifest.json").write_bytes(manifest_bytes(seal(values)))


def shards_with_ids_outside_the_vocabulary(place: Place) -> None:
    rewrite_rows(place, lambda rows: rows.__setitem__((0, 1), 200))


def shards_edited(place: Place) -> None:
    edit(place.own_shards() / "manifest.json", row_length=64)


VOCAB_SIZE, MASK_ID = "tokenizer.vocab_size", "tokenizer.special_ids.mask"

WORDS = [
    (partial(teacher_words, swap=(7, 8)), "teacher", "other tokens or ids than the shards'"),
    (teacher_tokenizer_json_of_other_words, "teacher", "other tokens or ids than the shards'"),
    (partial(teacher_words, swap=(2, 4)), "teacher", "other tokens"),
    (
        partial(teacher_settings, mask_token="[CLS]", cls_token="[MASK]"),
        "its cls token has id 4, the shards' has 2",
    ),
    (teacher_pad_named_unk, "its pad token has id 1, the shards' has 0"),
    (
        partial(teacher_settings, mask_token="<mask>"),
        "its mask token has id None, the shards' has 4",
    ),
    (partial(teacher_config, pad_token_id=1), "its pad token has id 1, the shards' has 0"),
    (
        partial(small_teacher, vocab_size=199),
        "its vocabulary has 199 tokens, that of the shards 200",
    ),
    (
        partial(small_teacher, vocab_size=201),
        "its vocabulary has other tokens or ids than the shards'",
    ),
    (
        partial(teacher_settings, do_lower_case=False),
        "it keeps case, keeps accents, the shards' lower-cases, strips accents",
    ),
    (student_words_swapped, "student.init", "other tokens"),
    (partial(Place.student, pad_token_id=1), "student.init", "its pad token has id 1"),
]
MODELS = [
    (
        teacher_whose_tokenizer_json_has_other_ids,
        "teacher",
        "vocab.txt and its tokenizer.json differ",
    ),
    (teacher_without_tokenizer, "teacher", "no vocab.txt", "teacher_vocabulary: same"),
    (student_without_tokenizer, "student.init", "no vocab.txt or tokenizer.json"),
    (
        partial(small_teacher, max_position_embeddings=31),
        "teacher",
        "max_position_embeddings is 31",
        "row_length: 31",
    ),
    (partial(mlm, max_position_embeddings=16), "model", "positions", "row_length: 16"),
    (student_with_few_positions, "student.init", "positions", "row_length: 31"),
    (teacher_is_an_albert, "a albert", "supported are bert, distilbert"),
    (teacher_without_head, "no trained masked-language-model head", "BertForMaskedLM"),
    (partial(teacher_config, num_hidden_layers=5), "do not fit its config.json", "layer.4"),
    (partial(teacher_config, num_hidden_layers=3), "do not fit its config.json", "layer.3"),
    (teacher_in_int8, "holds torch.int8", "save the model in fp32"),
    (partial(teacher_config, is_decoder=True), "is_decoder is true", "bidirectional"),
    (student_is_wider, "objective.cosine 1", "the student has 48 and the teacher 32"),
    (student_without_head, "masked-language-model head", "saved as DistilBertForMaskedLM"),
    (student_is_a_bert, "student.init", "no distilbert", "student.architecture: same"),
]
SHARDS = [
    (shards_with_ids_outside_the_vocabulary, "id 200 is outside the vocabulary"),
    (partial(forged_manifest, key=VOCAB_SIZE, value=70_000), "uint16 does not hold"),
    (partial(forged_manifest, key=MASK_ID, value=2), "special ids", "'mask': 2"),
    (partial(forged_manifest, key=MASK_ID, value=200), "'mask': 200"),
    (partial(forged_manifest, key="format_version", value=3), "format version 3"),
    (shards_edited, "edited or damaged"),
]
AGAIN = "prepare the corpus with its tokenizer"
PREPARE = "run `distil prepare` again"
FRESH = [
    *((*case, AGAIN) for case in WORDS),
    *MODELS,
    *((*case, PREPARE) for case in SHARDS),
]


@pytest.mark.parametrize("case", FRESH, ids=case_name)
def test_a_new_run_with_a_mistake_is_refused(place: Place, case: tuple[Any, ...]) -> None:
    spoil, *parts = case
    spoil(place)
    assert_refused(place, *parts)
    assert not place.files()


def test_teacher_vocabulary_same_accepts_a_teacher_without_tokenizer(place: Place) -> None:
    teacher_without_tokenizer(place)
    place.values["teacher_vocabulary"] = "same"
    start(place.values, stop_after=1)
    place.save_teacher(place.teacher, place.bert(4))  # the files may come later
    del place.values["teacher_vocabulary"]
    start(place.values, stop_after=2)
    assert place.checkpoint(2).is_dir()
    place.save_teacher(place.teacher, place.bert(4), swapped(place.words, 7, 8))
    place.values["teacher_vocabulary"] = "same"
    assert_refused(place, "other tokens")


# --- a run that was begun -------------------------------------------------------------------


FIX = "Revert the change, or set a different `output:` to start a new run"
RECIPES = [
    ("objective", {"name": "distilbert", "kl": 1.0}, "objective.kl was 5.0 and is now 1.0"),
    ("objective", {"name": "distilbert", "temperature": 3.0}, "objective.temperature was"),
    ("train", {"max_steps": 5}, "train.max_steps was 4 and is now 5"),
    ("train", {"seed": 1}, "train.seed was 0 and is now 1"),
    ("train", {"global_batch_size": 8}, "train.global_batch_size was 4"),
    ("train", {"precision": "bf16"}, "train.precision was fp32 and is now bf16"),
    ("optimizer", {"learning_rate": 2e-3}, "optimizer.learning_rate was 0.001"),
    ("optimizer", {"warmup_ratio": 0.5}, "optimizer.warmup_ratio was 0.05"),
    ("masking", {"mode": "smoothed"}, "masking.mode was uniform"),
    ("student", {"num_layers": 1}, "student.num_layers was 2 and is now 1"),
    ("student", {"dropout": 0.2}, "student.dropout was 0.1 and is now 0.2"),
]


@pytest.mark.parametrize(("section", "change", "message"), RECIPES)
def test_a_run_resumed_with_another_recipe_is_refused(
    place: Place, stopped: Path, section: str, change: Values, message: str
) -> None:
    shutil.copytree(stopped, place.output)
    place.values[section] = place.values.get(section, {}) | change
    assert_refused(place, message, FIX)


def test_layers_that_a_run_has_noted_may_be_written_out(place: Place, stopped: Path) -> None:
    """Continue a run of `init: teacher`, whatever that means today, by the layers it began from."""
    shutil.copytree(stopped, place.output)
    place.values["student"] = place.values.get("student", {}) | {"init": [0, 2], "num_layers": None}
    assert_refused(place, "student.init was teacher and is now [0, 2]", FIX)
    place.values["student"] |= {"init": [1, 3]}
    start(place.values)
    assert place.checkpoint(4).is_dir()


def other_shards(place: Place) -> None:
    rewrite_rows(place, lambda rows: rows.__setitem__((0, 1), 10 + rows[0, 1] % 50))


def another_teacher(place: Place, layers: int, **changes: int) -> None:
    place.save_teacher(place.teacher, place.bert(layers, **changes))


def a_checkpoint_of_another_run(place: Place) -> None:
    """Copy a newer checkpoint of another run next to the run's own."""
    other = place.values | {"output": str(place.folder / "other")}
    start(other | {"train": place.values["train"] | {"seed": 7}}, stop_after=3)
    shutil.copytree(step_folder(other["output"], 3), place.checkpoint(3))


def moments(place: Place, change: Callable[[dict[str, Tensor]], object]) -> None:
    """Change the optimizer state of the newest checkpoint, and seal it again."""
    tensors = load_file(place.checkpoint() / "optimizer.safetensors")
    change(tensors)
    save_file(tensors, place.checkpoint() / "optimizer.safetensors")
    reseal_checkpoint(place.checkpoint())


NORM, NOBODY = "vocab_layer_norm.weight/exp_avg", "nobody/exp_avg"
ANOTHER = "another checkpoint"


def moments_in_bf16(place: Place) -> None:
    moments(place, lambda t: t.update({name: value.bfloat16() for name, value in t.items()}))


def a_moment_is_missing(place: Place) -> None:
    moments(place, lambda t: t.pop(NORM))


def another_moment(place: Place, name: str, size: int) -> None:
    moments(place, lambda t: t.update({name: torch.zeros(size)}))


def a_checkpoint_of_a_later_format(place: Place) -> None:
    reseal_checkpoint(place.checkpoint(), format=99)


def no_checkpoint_is_whole(place: Place) -> None:
    for step in (1, 2):
        (place.checkpoint(step) / "optimizer.safetensors").write_bytes(b"")


RESUMED = [
    (mlm, "objective.name was distilbert and is now mlm", FIX),
    (other_shards, "have changed", FIX),
    (partial(another_teacher, layers=4, seed=9), "teacher", "has different weights", FIX),
    (partial(another_teacher, layers=2), "teacher", "has different weights", FIX),
    (a_checkpoint_of_another_run, "step-00000003", "train.seed was 7 and is now 0", FIX),
    (moments_in_bf16, "optimizer.safetensors", "bfloat16", ANOTHER),
    (a_moment_is_missing, NORM, "is missing", ANOTHER),
    (partial(another_moment, name=NORM, size=31), NORM, "[31]", ANOTHER),
    (
        partial(another_moment, name=NOBODY, size=3),
        NOBODY,
        "this run needs no such tensor",
        ANOTHER,
    ),
    (a_checkpoint_of_a_later_format, "format 99", "continue with the version that wrote it"),
    (no_checkpoint_is_whole, "no checkpoint verifies", "restore one, or remove the folder"),
]


@pytest.mark.parametrize("case", RESUMED, ids=case_name)
def test_a_resumed_run_with_a_mistake_is_refused(
    place: Place, stopped: Path, case: tuple[Any, ...]
) -> None:
    spoil, *parts = case
    shutil.copytree(stopped, place.output)
    spoil(place)
    assert_refused(place, *parts)


def test_a_run_refused_for_lack_of_memory_is_unchanged(
    place: Place, stopped: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Refuse as late as possible: on a GPU, after everything was built."""

    def refuse(*_: object) -> None:
        raise RunError("micro_batch_size auto: not even 1 row fits")

    shutil.copytree(stopped, place.output)
    with (place.output / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"kind": "train", "step": 3, "loss": 1.0}\n')  # of a run that was killed
    place.values["logging"]["trackers"] = ["tensorboard"]
    monkeypatch.setattr(pretrain.train, "resolve_micro_batch", refuse)
    assert_refused(place, "micro_batch_size auto: not even 1 row fits")


# --- an output that is something else -------------------------------------------------------


def output_at(place: Place, where: str) -> None:
    """Write to `where`, next to a teacher, a student and shards in use."""
    place.student()
    place.own_shards()
    place.values["output"] = str(place.folder / where)


def output_is_a_link_to_the_teacher(place: Place) -> None:
    place.output.symlink_to(place.teacher)


def output_is_a_run_that_holds_the_shards(place: Place) -> None:
    start(place.values, stop_after=1)
    shutil.copytree(place.corpus, place.output / "shards")
    place.values["shards"] = str(place.output / "shards")


def output_is_a_name_that_a_hub_could_have(place: Place) -> None:
    """Name a folder that would be the teacher of the next start."""
    place.values |= {"teacher": "nobody/teacher@main", "output": "nobody/teacher"}


def output_with(place: Place, name: str, content: str = "mine") -> None:
    path = place.output / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content, encoding="utf-8")


def output_has_the_files_of_another_program(place: Place) -> None:
    output_with(place, "config.json", '{"model_type": "bert"}\n')
    output_with(place, "metrics.jsonl", '{"epoch": 1}\n')


def output_has_a_config_with_the_keys_of_a_run(place: Place) -> None:
    output_with(place, "config.json", '{"shards": 1, "objective": 2, "train": 3}')


def output_is_a_file(place: Place) -> None:
    place.output.write_text("mine", encoding="utf-8")


def output_is_of_another_run_without_checkpoints(place: Place) -> None:
    values = place.values | {"objective": {"name": "distilbert", "kl": 3.0}}
    start(values, stop_after=1)
    shutil.rmtree(place.output / "checkpoints")


TAKEN = [
    (partial(output_at, where="teacher"), "teacher"),
    (output_is_a_link_to_the_teacher, "teacher"),
    (partial(output_at, where="teacher/run"), "teacher"),
    (partial(output_at, where="student"), "student.init"),
    (partial(output_at, where="shards"), "shards"),
    (partial(output_at, where="shards/run"), "shards"),
    (output_is_a_run_that_holds_the_shards, "shards"),
    (output_is_a_name_that_a_hub_could_have, "teacher nobody/teacher"),
    (output_has_the_files_of_another_program, "config.json"),
    (partial(output_with, name="checkpoints/epoch-1.pt"), "checkpoints"),
    (partial(output_with, name="thesis.tex"), "thesis.tex"),
    (output_is_a_file, "is not a folder"),
    (output_is_of_another_run_without_checkpoints, "whose checkpoints are gone"),
    (output_has_a_config_with_the_keys_of_a_run, "config.json"),
]


@pytest.mark.parametrize("case", TAKEN, ids=case_name)
def test_an_output_with_foreign_files_is_refused_and_unchanged(
    place: Place, case: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    spoil, part = case
    monkeypatch.chdir(place.folder)
    spoil(place)
    before = everything(place.folder)
    with refused("output", part, "set another `output:`"):
        start(place.values)
    assert everything(place.folder) == before


def test_an_output_with_yaml_or_of_this_run_is_accepted(place: Place) -> None:
    (place.output / "logs").mkdir(parents=True)  # of a launch that was refused
    for name in ("run.yaml", "corpus.yml", ".gitignore"):
        (place.output / name).write_text("# mine\n", encoding="utf-8")
    start(place.values, stop_after=1)
    (place.output / "notes.txt").write_text("mine", encoding="utf-8")
    start(place.values, stop_after=2)
    assert place.checkpoint(2).is_dir()
    shutil.rmtree(place.output / "checkpoints")  # as a run that was killed before the first
    start(place.values, stop_after=1)
    assert (place.output / "notes.txt").read_text(encoding="utf-8") == "mine"


def test_a_run_without_mistakes_resumes(place: Place, stopped: Path) -> None:
    """Show that not everything is refused."""
    shutil.copytree(stopped, place.output)
    start(place.values)
    assert place.checkpoint(4).is_dir()


def test_a_run_without_mistakes_starts(place: Place) -> None:
    place.student()
    place.own_shards()
    start(place.values, stop_after=1)
    assert place.checkpoint(1).is_dir()


def test_a_student_in_half_precision_is_widened(place: Place) -> None:
    folder = place.student()
    before = load_file(folder / "model.safetensors")
    change_weights(folder, lambda name, tensor: tensor.half())
    model = load_model(folder)
    for name, parameter in model.named_parameters():
        assert parameter.dtype == torch.float32
        assert torch.equal(parameter, before[name].half().float()), name


def test_a_loaded_model_does_not_change_with_its_file(place: Place) -> None:
    """Check that weights are copied from the file, not mapped: a later write changes no run."""
    folder = place.student()
    before = {name: t.clone() for name, t in load_file(folder / "model.safetensors").items()}
    model = load_model(folder)
    with (folder / "model.safetensors").open("r+b") as file:
        file.seek(-4096, 2)
        file.write(bytes(4096))
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name]), name
