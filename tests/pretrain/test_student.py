"""Check accepted and refused teachers, and students built from their layers."""

import copy
import json
import shutil
import tarfile
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.processes import ROOT
from support.runs import history, refused, start
from support.said import Said
from support.tiny import as_teacher, save_teacher, tiny_bert
from torch import Tensor
from transformers import (
    AutoModelForMaskedLM,
    BertConfig,
    BertForPreTraining,
)

from data_prep.shards import Manifest
from data_prep.shards.manifest import SpecialIds, TokenizerRecord, vocabulary_sha256
from pretrain.config import RunConfig
from pretrain.export.export import export
from pretrain.model.model_config import Model, Student
from pretrain.model.student import build_model, build_student
from pretrain.model.teacher import Teacher, load_teacher, parameters_sha256
from pretrain.plan import default_layers

REAL_BODY = ROOT.parent / "shared/data/minilm-l6-body.tar.xz"


@pytest.fixture(scope="module")
def teacher() -> Teacher:
    return as_teacher(tiny_bert(4))


@pytest.fixture(scope="module")
def ids() -> Tensor:
    """Draw three unpacked rows of 20 tokens."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 200, (3, 20), generator=generator)


# --- students --------------------------------------------------------------------------------


def test_all_layers_give_the_teachers_outputs(teacher: Teacher, ids: Tensor) -> None:
    """Check also the token-type embedding, which a DistilBERT does not have."""
    student = build_student(Student(num_layers=4), teacher, seed=0)
    assert student.training
    student.eval()
    with torch.no_grad():
        ours = student(input_ids=ids, output_hidden_states=True)
        theirs = teacher.model(input_ids=ids, output_hidden_states=True)
    assert len(ours.hidden_states) == len(theirs.hidden_states) == 5
    for one, other in zip(ours.hidden_states, theirs.hidden_states, strict=True):
        assert (one - other).abs().max() < 1e-5
    assert (ours.logits - theirs.logits).abs().max() < 1e-5
    # The comparison would notice: without token type 0 the first of them differ.
    position = teacher.model.bert.embeddings.position_embeddings.weight
    student.distilbert.embeddings.position_embeddings.weight.data.copy_(position)
    with torch.no_grad():
        without = student(input_ids=ids, output_hidden_states=True)
    assert (without.hidden_states[0] - theirs.hidden_states[0]).abs().max() > 0.1


@pytest.mark.parametrize(
    ("config", "layers"),
    [(Student(), (1, 3)), (Student(num_layers=3), (0, 2, 3)), (Student(init=(3, 1)), (3, 1))],
    ids=["half", "three", "listed"],
)
def test_students_have_the_chosen_layers(
    config: Student, layers: tuple[int, ...], teacher: Teacher, ids: Tensor
) -> None:
    """Compare a student of layers (3, 1) with a teacher cut to its layers 3 and 1."""
    student = build_student(config, teacher, seed=0).eval()
    shorter = copy.deepcopy(teacher.model)
    shorter.bert.encoder.layer = torch.nn.ModuleList(
        teacher.model.bert.encoder.layer[layer] for layer in layers
    )
    with torch.no_grad():
        difference = student(input_ids=ids).logits - shorter(input_ids=ids).logits
    assert difference.abs().max() < 1e-5
    assert student.config.n_layers == len(layers)
    assert student.vocab_projector.weight is student.distilbert.embeddings.word_embeddings.weight


def test_copies_share_no_memory_with_the_teacher() -> None:
    teacher = as_teacher(tiny_bert(2))
    before = parameters_sha256(teacher.model)
    student = build_student(Student(num_layers=2), teacher, seed=0)
    with torch.no_grad():
        for parameter in student.parameters():
            assert parameter.requires_grad and parameter.dtype == torch.float32
            parameter.add_(1.0)
    assert parameters_sha256(teacher.model) == before


def test_default_layers() -> None:
    assert default_layers(12, 6) == (1, 3, 5, 7, 9, 11)
    assert default_layers(4, 2) == (1, 3)
    assert default_layers(6, 3) == (1, 3, 5)
    assert default_layers(12, 3) == (3, 7, 11)
    assert default_layers(22, 7, 3) == (0, 4, 8, 12, 16, 17, 21)  # ModernBERT-base's last is global
    for teacher, period in product(range(1, 25), range(1, 7)):
        for student in range(1, teacher + 1):
            layers = default_layers(teacher, student, period)
            assert len(set(layers)) == student and sorted(layers) == list(layers)
            assert [layer % period for layer in layers] == [i % period for i in range(student)]
            assert layers[-1] > teacher - 1 - period or layers == (0,)
            assert period == 1 or layers[0] == 0


def test_layers_the_teacher_does_not_have(teacher: Teacher) -> None:
    with refused("num_layers 5 is more than the teacher's 4"):
        build_student(Student(num_layers=5), teacher, seed=0)
    for layer in (4, -1):
        with refused(f"layers 0 to 3, not {layer}"):
            build_student(Student(init=(0, layer)), teacher, seed=0)


def test_random_students(teacher: Teacher) -> None:
    """Check repeatability after other random draws, BERT's deviation, norms of 1 and 0."""
    torch.manual_seed(1)
    first = build_student(Student(init="random"), teacher, seed=7)
    torch.manual_seed(2)
    again = build_student(Student(init="random"), teacher, seed=7)
    other = build_student(Student(init="random"), teacher, seed=8)
    copied = build_student(Student(), teacher, seed=7)
    assert parameters_sha256(first) == parameters_sha256(again)
    for name, parameter in first.named_parameters():
        if parameter.dim() > 1:
            assert parameter.std().item() == pytest.approx(0.02, rel=0.1)
            assert abs(parameter.mean().item()) < 4 * 0.02 / parameter.numel() ** 0.5
            assert not torch.equal(parameter, other.get_parameter(name))
            assert not torch.equal(parameter, copied.get_parameter(name))
        else:
            norm = "norm" in name.lower() and name.endswith("weight")
            assert (parameter == float(norm)).all(), name


def test_dropout_comes_from_the_config(teacher: Teacher) -> None:
    student = build_student(Student(dropout=0.3, attention_dropout=0.2), teacher, seed=0)
    rates = {n: m.p for n, m in student.named_modules() if isinstance(m, torch.nn.Dropout)}
    assert len(rates) == 5  # embeddings, and attention and feed-forward of two layers
    for name, rate in rates.items():
        assert rate == (0.2 if "attention" in name else 0.3), name


def test_continue_from_a_folder(teacher: Teacher, tmp_path: Path) -> None:
    saved = build_student(Student(init="random", num_layers=3), teacher, seed=4)
    saved.save_pretrained(tmp_path / "student")
    config = Student(init=str(tmp_path / "student"), dropout=0.25, attention_dropout=0.05)
    found = build_student(config, teacher, seed=9)
    assert parameters_sha256(found) == parameters_sha256(saved)
    assert found.training
    rates = {n: m.p for n, m in found.named_modules() if isinstance(m, torch.nn.Dropout)}
    assert set(rates.values()) == {0.25, 0.05}
    with refused("has n_layers 3, but this run needs 2"):
        build_student(Student(init=str(tmp_path / "student"), num_layers=2), teacher, seed=9)


def test_a_missing_folder_is_no_student(teacher: Teacher, tmp_path: Path) -> None:
    with refused("student.init", "there is no", "or give a list of teacher layers"):
        build_student(Student(init=str(tmp_path / "nowhere")), teacher, seed=0)


def test_a_run_without_a_checkpoint_is_no_model(
    tmp_path: Path, manifest: Manifest, run_config: Callable[..., dict[str, Any]]
) -> None:
    """Say so, instead of reading the run's config.json as that of a model."""
    run = RunConfig.model_validate(run_config(tmp_path, teacher=tmp_path))
    (tmp_path / "config.json").write_text(run.model_dump_json())
    with refused(f"{tmp_path}: no checkpoint"):
        load_teacher(str(tmp_path), manifest)
    with refused(f"{tmp_path}: no checkpoint"):
        build_student(Student(init=str(tmp_path)), as_teacher(tiny_bert()), seed=0)


def test_a_teacher_with_another_epsilon() -> None:
    with refused("layer_norm_eps is 1e-05"):
        build_student(Student(), as_teacher(tiny_bert(2, layer_norm_eps=1e-5)), seed=0)


@pytest.mark.parametrize("architecture", ["bert", "roberta", "modernbert"])
def test_a_new_model_takes_rows_of_all_its_positions(
    architecture: str, tmp_path: Path, run_config: Callable[..., dict[str, Any]]
) -> None:
    """Train one from scratch, export it, and continue the export under `model.init`."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = {**sizes, "intermediate_size": 48, "max_position_embeddings": 32}
    train = {"max_steps": 2, "global_batch_size": 4}
    first = run_config(
        tmp_path / "first",
        objective={"name": "mlm"},
        model={**model, "architecture": architecture},
        train=train,
    )
    start(first)
    export(tmp_path / "first", tmp_path / "exported", pytest.fail)
    loaded = AutoModelForMaskedLM.from_pretrained(tmp_path / "exported")
    assert loaded.config.model_type == architecture
    more = {
        **first,
        "output": str(tmp_path / "more"),
        "model": {"init": str(tmp_path / "exported")},
    }
    said = Said()
    start({**more, "train": {**first["train"], "max_steps": 1}}, progress=said)
    assert not [line for line in said.lines if "got a new one" in line]
    begun, ended = (
        {e["step"]: e["loss"] for e in history(values["output"]) if e["kind"] == "evaluation"}
        for values in (more, first)
    )
    assert begun[0] == pytest.approx(ended[2], rel=1e-6)  # it begins where the other has ended
    card = tmp_path / "card"
    export(tmp_path / "more", card, pytest.fail)
    assert "an existing model" in (card / "README.md").read_text()
    with refused("is model.init", "only reads"):
        start({**more, "output": str(tmp_path / "exported")})


def test_sizes_beside_an_init_are_refused() -> None:
    with pytest.raises(ValueError, match="hidden_size cannot be set with init"):
        Model(init="somewhere", hidden_size=32)


def test_a_new_bert_has_the_sizes_of_the_config(manifest: Manifest) -> None:
    sizes = Model(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=32,
    )
    model = build_model(sizes, manifest, 3, [])
    assert model.training and model.config.vocab_size == 200
    # Embeddings 8,640 + 64, layers 2 x 8,544, head 1,056 + 64 + 200.
    assert sum(p.numel() for p in model.parameters()) == (232 + 2) * 32 + 64 + 2 * 8544 + 1320
    assert parameters_sha256(model) == parameters_sha256(build_model(sizes, manifest, 3, []))
    with refused("rows of 32 tokens need as many positions"):
        build_model(
            sizes.model_copy(update={"max_position_embeddings": 31}), manifest, 3, pytest.fail
        )


# --- teachers --------------------------------------------------------------------------------


Load = Callable[[], Teacher]


@pytest.fixture
def load(tmp_path: Path, manifest: Manifest) -> Load:
    """Return a function that loads the teacher of a test's folder."""
    return lambda: load_teacher(str(tmp_path), manifest)


def test_a_half_precision_teacher_is_widened(tmp_path: Path, load: Load) -> None:
    save_teacher(tmp_path, tiny_bert().to(torch.bfloat16))
    assert {parameter.dtype for parameter in load().model.parameters()} == {torch.float32}


def test_a_pretraining_checkpoint_has_a_head(tmp_path: Path, load: Load, ids: Tensor) -> None:
    """Load next-sentence head and pooler too, as Google's BERT came."""
    save_teacher(tmp_path)
    torch.manual_seed(0)
    whole = BertForPreTraining(BertConfig.from_pretrained(tmp_path)).eval()
    whole.save_pretrained(tmp_path)
    model = load().model
    with torch.no_grad():
        expected = whole(input_ids=ids).prediction_logits
        assert (model(input_ids=ids).logits - expected).abs().max() < 1e-5


def test_the_shards_own_tokenizer_and_just_enough_positions_are_accepted(
    tmp_path: Path, corpus: Path, load: Load
) -> None:
    save_teacher(tmp_path, tiny_bert(1, max_position_embeddings=32))
    load()
    (tmp_path / "vocab.txt").unlink()
    shutil.copy(corpus / "tokenizer" / "tokenizer.json", tmp_path)
    load()


@pytest.mark.parametrize("name", ["a missing folder", "no-such-owner/no-such-model", "a@b@c"])
def test_a_missing_teacher(name: str, tmp_path: Path, manifest: Manifest) -> None:
    """Check the error at once and in one line, without a reachable hub."""
    path = str(tmp_path / name) if name == "a missing folder" else name
    with refused(path, "check the path" if name == "a missing folder" else "check the name"):
        load_teacher(path, manifest)


def test_a_teacher_saved_by_an_old_version_is_loaded(
    tmp_path: Path, load: Load, ids: Tensor
) -> None:
    """Load `.bin`, gamma and beta, no model_type, no decoder.bias: the same model as today's."""
    model = save_teacher(tmp_path)
    state = {}
    for name, tensor in load_file(tmp_path / "model.safetensors").items():
        name = name.replace("LayerNorm.weight", "LayerNorm.gamma")
        state[name.replace("LayerNorm.bias", "LayerNorm.beta")] = tensor
    state["cls.predictions.decoder.weight"] = state["bert.embeddings.word_embeddings.weight"]
    state["bert.embeddings.position_ids"] = torch.arange(64)[None]
    assert "cls.predictions.bias" in state and "cls.predictions.decoder.bias" not in state
    (tmp_path / "model.safetensors").unlink()
    torch.save(state, tmp_path / "pytorch_model.bin")
    config = json.loads((tmp_path / "config.json").read_text())
    del config["model_type"], config["architectures"], config["transformers_version"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    teacher = load()
    with torch.no_grad():
        assert (teacher.model(input_ids=ids).logits - model(input_ids=ids).logits).abs().max() == 0
    head = teacher.model.cls.predictions
    assert torch.equal(head.decoder.bias, head.bias) and head.bias.abs().max() > 0.1


# --- a real one ------------------------------------------------------------------------------


def fitting_manifest(manifest: Manifest, words: list[str], row_length: int) -> Manifest:
    special = SpecialIds(
        **{key: words.index(f"[{key.upper()}]") for key in ("pad", "unk", "cls", "sep", "mask")}
    )
    tokenizer = TokenizerRecord(
        fingerprint="0" * 64,
        vocabulary_sha256=vocabulary_sha256(words),
        vocab_size=len(words),
        special_ids=special,
    )
    return manifest.model_copy(update={"tokenizer": tokenizer, "row_length": row_length})


def test_the_real_teacher(reactions: Path, manifest: Manifest, tmp_path: Path) -> None:
    """Load it, predict reactions, and build a student of six of its layers."""
    (real_teacher,) = reactions.glob("models/*")
    words = (real_teacher / "vocab.txt").read_text().splitlines()
    fitting = fitting_manifest(manifest, words, 512)
    teacher = load_teacher(str(real_teacher), fitting)
    weights = torch.load(real_teacher / "pytorch_model.bin", weights_only=True)
    state = teacher.model.state_dict()
    assert len(teacher.model.bert.encoder.layer) == 12
    for name, tensor in weights.items():
        name = name.replace("LayerNorm.gamma", "LayerNorm.weight")
        name = name.replace("LayerNorm.beta", "LayerNorm.bias")
        if name in state:
            assert torch.equal(state[name], tensor), name

    # Ethyl bromide and hydroxide to ethanol; the hidden atom is a carbon.
    smiles = ["C", "C", "Br", ".", "[OH-]", ">>", "C", "C", "O"]
    tokens = ["[CLS]", *smiles, "[SEP]"]
    assert set(tokens) <= set(words)
    ids = torch.tensor([[words.index(token) for token in tokens]])
    ids[0, 8] = words.index("[MASK]")
    with torch.no_grad():
        logits = teacher.model(input_ids=ids).logits
    assert words[int(logits[0, 8].argmax())] == "C"

    whole = build_student(Student(num_layers=12), teacher, seed=0).eval()
    with torch.no_grad():
        assert (whole(input_ids=ids).logits - logits).abs().max() < 1e-4
    student = build_student(Student(), teacher, seed=0)
    for place, layer in enumerate((1, 3, 5, 7, 9, 11)):
        ours = student.distilbert.transformer.layer[place].attention.q_lin.weight
        assert torch.equal(ours, state[f"bert.encoder.layer.{layer}.attention.self.query.weight"])

    longer = fitting_manifest(manifest, words, 4096)
    with refused(str(real_teacher), "rows of 4096 tokens"):
        load_teacher(str(real_teacher), longer)
    shutil.copytree(real_teacher, tmp_path / "copy")
    (tmp_path / "copy" / "vocab.txt").write_text("\n".join(words[::-1]) + "\n")
    with refused(str(tmp_path / "copy"), "other tokens"):
        load_teacher(str(tmp_path / "copy"), fitting)


@pytest.mark.slow
@pytest.mark.skipif(not REAL_BODY.is_file(), reason="../shared/data has no minilm-l6-body.tar.xz")
def test_a_real_body_teaches_after_it_was_continued(manifest: Manifest, tmp_path: Path) -> None:
    """Refuse a sentence encoder as DistilBERT's teacher, and give it a head under `model.init`."""
    with tarfile.open(REAL_BODY) as archive:
        archive.extraction_filter = getattr(tarfile, "data_filter", None)
        archive.extractall(tmp_path)
    body = tmp_path / "minilm-l6-body"
    vocabulary = json.loads((body / "tokenizer.json").read_bytes())["model"]["vocab"]
    fitting = fitting_manifest(manifest, sorted(vocabulary, key=vocabulary.__getitem__), 128)
    with refused(str(body), "no trained masked-language-model head", "mlm and model.init"):
        load_teacher(str(body), fitting)

    assert load_teacher(str(body), fitting, needs_head=False).model.config.num_hidden_layers == 6
    said: list[str] = []
    model: Any = build_model(Model(init=str(body)), fitting, 0, said)
    assert len(said) == 2 and "got a new one, tied to its embeddings" in said[1]
    tensors = load_file(body / "model.safetensors")
    name = "encoder.layer.5.attention.self.query.weight"
    assert torch.equal(model.bert.get_parameter(name), tensors[name].float())
    words = tensors["embeddings.word_embeddings.weight"].float()
    assert torch.equal(model.cls.predictions.decoder.weight, words)
