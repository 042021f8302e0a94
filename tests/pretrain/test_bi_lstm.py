"""Compare the BiLSTM with torch's own, one text at a time, and distil a teacher into it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from support import runs, task_data
from support.results import difference, losses
from support.runs import refused, step_folder
from support.task_data import run_of
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification

from data_prep.shards import open_shards
from pretrain import RunError
from pretrain.config import RunConfig
from pretrain.contracts.batch import apart
from pretrain.contracts.packing import find_documents
from pretrain.data.order import Order
from pretrain.export.export import export
from pretrain.export.onnx.graph import Graph, write_graph
from pretrain.model.cut import cut_zero_heads
from pretrain.model.families import FAMILIES, encode
from pretrain.model.families.bi_lstm import BiLstmConfig, BiLstmForSequenceClassification
from pretrain.model.model_config import Student
from pretrain.model.session import Session
from pretrain.model.task_head import TaskHead
from pretrain.model.word_vectors import read_vectors
from pretrain.objectives.kd import SoftLabels
from pretrain.shrink.prune import magnitudes
from pretrain.tasks.labelled.examples import LabelledRows

SIZES = {"vocab_size": 60, "embedding_size": 6, "hidden_size": 10, "intermediate_size": 7}
SEP = 3
SOFT = {"name": "kd", "divergence": "squared", "soft": 1.0, "hard": 0.0}
SMALL = {"architecture": "bilstm", "hidden_size": 20, "intermediate_size": 12}


def reference(model: Any, ids: Tensor, second: int) -> Tensor:
    """Return the logits of a text by torch's bidirectional LSTM, in fp64."""
    state = {name: t.double() for name, t in model.state_dict().items()}
    config = model.config
    tables = ["fixed", "embeddings"] if config.fixed_vectors else ["embeddings"]
    texts = [ids[:second], ids[second:]] if config.siamese else [ids]
    found = []
    for text in texts:
        x = torch.cat([state[f"bilstm.{table}.weight"][text] for table in tables], dim=-1)
        for layer in range(config.num_hidden_layers):
            width = config.hidden_size // 2
            lstm = nn.LSTM(x.shape[-1], width, bidirectional=True).double()
            own = {}
            for way, end in (("forwards", ""), ("backwards", "_reverse")):
                prefix = f"bilstm.layers.{layer}.{way}."
                own |= {n.removeprefix(prefix) + end: t for n, t in state.items() if prefix in n}
            lstm.load_state_dict(own)
            x, (last, _) = lstm(x)
        found.append(torch.cat([last[0], last[1]]))
    features = found[0]
    if config.siamese:
        a, b = found
        features = torch.cat([a, b, (a - b).abs(), a * b])
    hidden = torch.relu(state["dense.weight"] @ features + state["dense.bias"])
    return (state["classifier.weight"] @ hidden + state["classifier.bias"]).detach()


@pytest.mark.parametrize("siamese", [False, True])
@pytest.mark.parametrize("fixed", [False, True])
def test_packed_and_padded_texts_equal_torchs_bidirectional_lstm(
    siamese: bool, fixed: bool
) -> None:
    torch.manual_seed(0)
    config = BiLstmConfig(
        **SIZES,
        num_hidden_layers=2,
        siamese=siamese,
        fixed_vectors=fixed,
        num_labels=3,
        sep_token_id=SEP,
    )
    model = BiLstmForSequenceClassification(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.5)
    lengths, seconds = [9, 4, 2, 7], [3, 1, 1, 6]
    texts = [torch.randint(4, 60, (n,)) for n in lengths]
    for text, second in zip(texts, seconds, strict=True):
        text[second - 1] = text[-1] = SEP  # behind the first one of which the second text begins
    expected = torch.stack([reference(model, t, s) for t, s in zip(texts, seconds, strict=True)])

    # As transformers calls it.
    ids = nn.utils.rnn.pad_sequence(texts, batch_first=True)
    place = torch.arange(9)
    mask = (place < torch.tensor(lengths)[:, None]).long()
    padded = model(ids, attention_mask=mask).logits
    torch.testing.assert_close(padded.double(), expected, rtol=1e-5, atol=1e-6)

    # As a run calls it: packed, and the head behind.
    family = FAMILIES["bilstm"]
    whole = family.architecture(config).eval()
    whole.bilstm.load_state_dict(model.bilstm.state_dict())
    head = TaskHead(config, "classes", ["a", "b", "c"]).eval()
    assert head.load(model.state_dict()) == []
    row, ends = torch.cat(texts)[None], np.cumsum([0, *lengths])
    packing = find_documents(row, torch.from_numpy(ends.astype(np.int32)), 9, pad_id=0)
    hidden = encode(whole, row, packing).last_hidden_state
    places = torch.from_numpy(np.where(mask.numpy() > 0, ends[:-1, None] + place.numpy(), -1))
    found = head(*apart(hidden, places))
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-6)


def test_the_papers_parameters_besides_word_vectors() -> None:
    config = BiLstmConfig(vocab_size=10, fixed_vectors=True, num_labels=2)
    model = BiLstmForSequenceClassification(config)
    own = {n: p.numel() for n, p in model.named_parameters() if "embeddings" not in n}
    del own["bilstm.fixed.weight"]
    # The paper's 963,002 have two words of bias in a gate, as torch's LSTM has.
    assert sum(own.values()) == 963_002


def settings(folder: Path, siamese: bool = False, **changes: Any) -> dict[str, Any]:
    pair = "other" if siamese else None
    task_data.make(folder, "classification", task={"name": "classification", "pair": pair})
    task_data.save_model(folder / "model", "bert", "classification")
    student = {**SMALL, "word_vectors": "teacher", "dropout": 0.0}
    values = {"teacher": str(folder / "model"), "objective": SOFT, "student": student, **changes}
    return run_of(folder, "classification", **values)


# One text or two differ in the walk, which the test of torch's LSTM compares for both.
@pytest.mark.parametrize("siamese", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_teacher_is_distilled_resumed_exported_and_run_by_onnx(
    tmp_path: Path, siamese: bool, distil: Any
) -> None:
    values = settings(tmp_path, siamese, optimizer={"learning_rate": 5e-3})
    runs.start(values)
    found = losses(values)
    epochs = [sum(found[i] for i in range(first, first + 8)) for first in (1, 13)]
    assert epochs[1] < 0.9 * epochs[0]
    again = values | {"output": str(tmp_path / "again")}
    runs.start(again, stop_after=9)
    runs.start(again)
    assert difference(values, again, 20) == 0
    # Fixed vectors stay the teacher's, and the trained ones beside them move.
    state = load_file(step_folder(values["output"], 20) / "student" / "model.safetensors")
    teacher = load_file(tmp_path / "model" / "model.safetensors")
    table = teacher["bert.embeddings.word_embeddings.weight"]
    assert torch.equal(state["fixed.weight"], table)
    assert not torch.equal(state["embeddings.weight"], table)

    exported = tmp_path / "exported"
    code, out, err = distil("export", values["output"], exported, "--onnx")
    assert code == 0, out + err
    model = AutoModelForSequenceClassification.from_pretrained(exported).eval()
    assert "import pretrain" in (exported / "README.md").read_text(encoding="utf-8")
    rows = LabelledRows(open_shards(tmp_path / "shards", "validation"))
    session = Session(exported / "onnx" / "model.onnx")
    for row, second in zip(rows.shards.rows(np.arange(6)), rows.columns["second"], strict=False):
        ids = torch.from_numpy(row[row != 0].astype("int64"))
        wanted = reference(model, ids, int(second)).numpy()
        given = {"input_ids": ids[None].numpy(), "attention_mask": np.ones_like(ids[None])}
        [answer] = session.session.run(["logits"], given)
        assert np.abs(answer[0] - wanted).max() < 1e-5


def test_the_second_file_of_a_process_reads_texts_of_any_length(tmp_path: Path) -> None:
    """Write two graphs, which no test's cache gives."""
    for seed in (0, 1):
        torch.manual_seed(seed)
        config = BiLstmConfig(**SIZES, num_hidden_layers=1, pad_token_id=0, sep_token_id=SEP)
        model = BiLstmForSequenceClassification(config).eval()
        graph = Graph(model, None, ["logits"], types=False)
        write_graph(graph, tmp_path / f"{seed}.onnx", {})
    session = Session(tmp_path / "1.onnx").session
    for length in (4, 9):
        given = {
            "input_ids": np.arange(5, 5 + length)[None],
            "attention_mask": np.ones((1, length)),
        }
        given = {name: value.astype(np.int64) for name, value in given.items()}
        wanted = model(**{name: torch.from_numpy(value) for name, value in given.items()}).logits
        [answer] = session.run(["logits"], given)
        assert np.abs(answer - wanted.detach().numpy()).max() < 1e-5


def test_squared_differences_are_summed_over_classes(tmp_path: Path) -> None:
    values = settings(tmp_path, optimizer={"learning_rate": 1e-9})
    values["student"] = {**values["student"], "word_vectors": 5}
    runs.start(values, stop_after=1)
    export(Path(values["output"]), tmp_path / "exported", pytest.fail)
    student, teacher = (
        AutoModelForSequenceClassification.from_pretrained(tmp_path / name).eval()
        for name in ("exported", "model")
    )
    rows = LabelledRows(open_shards(tmp_path / "shards"))
    numbers, total = Order(len(rows.shards), 12, 0).at(0)[1], 0.0
    for row in rows.shards.rows(numbers):
        ids = torch.from_numpy(row[row != 0].astype("int64"))[None]
        theirs = teacher(ids).logits
        total += float((student(ids).logits - theirs).square().sum())
    assert losses(values)[1] == pytest.approx(total / 12, rel=1e-5)
    assert SoftLabels(divergence="squared").parts[0].text == "squared difference of the logits"
    with pytest.raises(ValueError, match="has no temperature"):
        SoftLabels(divergence="squared", temperature=3)


def test_word_vectors_of_a_file(tmp_path: Path, distil: Any) -> None:
    values = settings(tmp_path)
    words = task_data.WORDS[:3]
    file = tmp_path / "vectors.txt"
    lines = [f"{word} {i}.5 -1 2e-1" for i, word in enumerate(words)]
    file.write_text("\n".join(["4 3", *lines, "else where 9 9 9"]) + "\n", encoding="utf-8")
    values["student"] = {**values["student"], "word_vectors": str(file)}
    values["optimizer"] = {"learning_rate": 1e-9}
    runs.start(values, stop_after=1)
    state = load_file(step_folder(values["output"], 1) / "student" / "model.safetensors")
    tokens = (tmp_path / "vocab.txt").read_text(encoding="utf-8").split("\n")
    for i, word in enumerate(words):
        for table in ("fixed", "embeddings"):
            own = state[f"{table}.weight"][tokens.index(word)].tolist()
            assert own == pytest.approx([i + 0.5, -1, 0.2])
    # A word without a vector has the same random one in both tables, in -0.25 to 0.25.
    other = state["fixed.weight"][tokens.index(task_data.WORDS[5])]
    assert 0 < other.abs().max() <= 0.25
    assert torch.allclose(other, state["embeddings.weight"][tokens.index(task_data.WORDS[5])])

    # The same file is wanted when the run goes on, and none is enough.
    keys = {**values, "train": {**values["train"], "max_steps": 20}}
    file.write_text("\n".join(lines[1:]) + "\n", encoding="utf-8")
    with refused("is not the file that this run began from"):
        runs.start(keys, stop_after=2)
    file.unlink()
    runs.start(keys, stop_after=2)

    def refuses(text: str, *parts: str, **student: Any) -> None:
        file.write_text(text, encoding="utf-8")
        keys = {**values["student"], **student}
        with refused(*parts):
            runs.start(values | {"student": keys, "output": str(tmp_path / "refused")})

    good = "\n".join(lines) + "\n"
    refuses(good + "x 1 2\n", "line 4 has 2 numbers", "before it 3")
    refuses(good + "x 1 2 3 4\n", "line 4 has 4 numbers", "before it 3")
    refuses("3 4\n" + good, "line 2 has 3 numbers", "before it 4")
    refuses(f"{words[0]} 1 nan 2\n", "line 1 holds 'nan'", "correct the file")
    refuses(f"{words[0]} 1 1e39 2\n", "line 1 holds '1e39'")
    refuses("elsewhere 1 2 3\n", "holds none of the")
    refuses(good, "No such file", "check the path", word_vectors=str(tmp_path / "no.txt"))


def found_in(folder: Path, tokens: list[str], lines: list[str], **kind: Any) -> dict[str, float]:
    """Return the first number of each token that a file of vectors has a line for."""
    tokenizer = folder / "shards" / "tokenizer"
    tokenizer.mkdir(parents=True, exist_ok=True)
    vocabulary = {token: i for i, token in enumerate(tokens)}
    model = models.BPE(vocabulary, []) if kind else models.WordPiece(vocabulary)
    made = Tokenizer(model)
    if kind:
        made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(), decoders.ByteLevel()
    made.save(str(tokenizer / "tokenizer.json"))
    (folder / "v.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    teacher: Any = SimpleNamespace(shards=folder / "shards")
    student = Student(architecture="bilstm", word_vectors=str(folder / "v.txt"))
    vectors = read_vectors(student, teacher)
    assert vectors is not None and len({*vectors.ids.tolist()}) == len(vectors.ids)
    pairs = zip(vectors.ids.tolist(), vectors.values[:, 0].tolist(), strict=True)
    return {tokens[id]: value for id, value in pairs}


def test_a_word_gets_its_own_first_line_and_else_that_in_lower_case(tmp_path: Path) -> None:
    lines = [
        "\ufeffthe 1 0",
        "apple 2 0",
        "Apple 3 0",
        "apple 4 0",
        ". . 5 0",
        "",
        "z\u00fcrich\t6 0",
    ]
    tokens = ["the", "The", "apple", "Apple", "##the", "\u0120", ".", "Z\u00fcrich"]
    found = found_in(tmp_path / "a", tokens, lines)
    assert found == {"the": 1, "The": 1, "apple": 2, "Apple": 3, "Z\u00fcrich": 6}
    # Byte-level tokens are spelled in bytes, and those that begin no word are pieces.
    tokens = ["the", "\u0120the", "\u0120The", "\u0120Z\u00c3\u00bcrich", "apple"]
    found = found_in(tmp_path / "b", tokens, lines, byte_level=True)
    assert found == {"\u0120the": 1, "\u0120The": 1, "\u0120Z\u00c3\u00bcrich": 6}


def test_what_a_bilstm_cannot_do_is_refused(tmp_path: Path) -> None:
    values = settings(tmp_path)
    layers = {"name": "tinybert", "attention": 0, "layers": [1]}
    for objective, kind in (({"name": "minilm"}, "mlm"), (layers, "classification")):
        with refused("needs the layers of a Transformer", "objective.name: kd"):
            runs.start(values | {"objective": objective, "task": {"name": kind}})
    task_data.make(tmp_path / "tags", "token_classification")
    task_data.save_model(tmp_path / "tagger", "bert", "token_classification")
    tags = {"shards": str(tmp_path / "tags" / "shards"), "teacher": str(tmp_path / "tagger")}
    with refused("has a head for classes and score"):
        runs.start(values | tags | {"task": {"name": "token_classification"}})
    runs.start(values, stop_after=1)
    again = {"teacher": values["output"], "student": {}, "output": str(tmp_path / "again")}
    with refused("a bilstm has no layers to copy"):
        runs.start(values | again)
    with pytest.raises(ValueError, match="has no attention"):
        Student(architecture="bilstm", num_attention_heads=2)
    with pytest.raises(ValueError, match="word_vectors are of a bilstm"):
        Student(word_vectors=5)
    with pytest.raises(ValueError, match="has no layers of its teacher"):
        Student(architecture="bilstm", init="teacher")
    with pytest.raises(ValueError, match="an even number"):
        Student(architecture="bilstm", hidden_size=5)
    with pytest.raises(ValueError, match="remove word_vectors"):
        Student(architecture="bilstm", init="folder", word_vectors="teacher")
    with pytest.raises(ValueError, match="a teacher must tell"):
        task = {"name": "classification", "masked": 0.1}
        soft = {"name": "kd", "soft": 0.0, "hard": 1.0}
        RunConfig.model_validate(values | {"task": task, "objective": soft})
    with pytest.raises(ValueError, match="that do not change"):
        task = {"name": "classification", "ngrams": 0.1, "logits": "file"}
        RunConfig.model_validate(values | {"task": task})


def test_a_bilstm_has_nothing_to_prune() -> None:
    model = BiLstmForSequenceClassification(BiLstmConfig(vocab_size=10, num_labels=2))
    with pytest.raises(RunError, match="a bilstm has no heads, and no feed-forward part"):
        magnitudes(model)
    assert cut_zero_heads(model) == 0
