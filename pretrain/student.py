"""Where models come from: the teacher, the student initialised from its layers, or a new BERT."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import (
    AutoTokenizer,
    BertConfig,
    BertForMaskedLM,
    DistilBertConfig,
    DistilBertForMaskedLM,
)
from transformers.utils.hub import cached_file

from data_prep.shards import Manifest, vocabulary_sha256
from pretrain import RunError
from pretrain.attention import IMPLEMENTATION
from pretrain.config import Model, Student

_PAPER_LAYERS = (0, 2, 4, 7, 9, 11)  # 12 -> 6, as the authors' released code takes them


@dataclass(frozen=True)
class Teacher:
    """A frozen BERT with a trained MLM head, and what identifies it."""

    model: BertForMaskedLM
    name: str
    local: bool  # a folder of this machine, which means nothing elsewhere
    revision: str | None  # the commit, where it came from a hub
    sha256: str  # of its parameters


def load_teacher(name: str, manifest: Manifest) -> Teacher:
    """Load a teacher from a folder, a hub name or `name@revision`, and hold it against the shards.

    Raises:
        RunError: it cannot be read, is no BERT, has no trained MLM head, its vocabulary is not the
            shards', or its positions are fewer than a row's.
    """
    source, _, revision = (name, "", "") if Path(name).exists() else name.partition("@")
    raw = _read_config(name, source, revision or None)
    _refuse_config(name, raw)
    try:
        loaded: Any = BertForMaskedLM.from_pretrained(
            source,
            revision=revision or "main",
            config=BertConfig.from_dict(raw),
            dtype=torch.float32,
            attn_implementation=IMPLEMENTATION,
            output_loading_info=True,
        )
    except (OSError, ValueError, RuntimeError) as error:
        raise RunError(f"teacher {name}: {_first_line(error)}") from error
    model, report = loaded
    # The decoder is tied to the embeddings and its bias to `predictions.bias`: not in old files.
    missing = sorted(key for key in report["missing_keys"] if ".decoder." not in key)
    if any(key.startswith("cls.predictions") for key in missing):
        raise RunError(
            f"teacher {name}: it has no trained masked-language-model head ({missing[0]} is not in "
            "its weights); take a checkpoint saved as BertForMaskedLM or BertForPreTraining"
        )
    if missing or report["mismatched_keys"]:
        odd = missing[0] if missing else sorted(report["mismatched_keys"])[0]
        raise RunError(f"teacher {name}: its weights do not fit its config.json (see {odd})")
    _check_vocabulary(name, source, revision or None, model, manifest)
    check_row_length(f"teacher {name}", model.config.max_position_embeddings, manifest)
    model.eval().requires_grad_(False)
    commit = getattr(model.config, "_commit_hash", None)
    return Teacher(model, name, Path(source).exists(), commit, parameters_sha256(model))


def check_row_length(who: str, max_position_embeddings: int, manifest: Manifest) -> None:
    """Refuse rows that are longer than a model's positions."""
    if manifest.row_length > max_position_embeddings:
        raise RunError(
            f"{who}: rows of {manifest.row_length} tokens need as many positions, but "
            f"max_position_embeddings is {max_position_embeddings}; prepare the corpus with "
            f"row_length: {max_position_embeddings}"
        )


def build_student(config: Student, teacher: Teacher, seed: int) -> DistilBertForMaskedLM:
    """The student a config asks for, in fp32 and in training mode.

    Raises:
        RunError: layers that the teacher does not have, or a folder that does not fit it.
    """
    bert = teacher.model.config
    if isinstance(config.init, str) and config.init not in ("teacher", "random"):
        return _continue_from(Path(config.init), config, bert)
    if isinstance(config.init, str):
        num_layers = config.num_layers or max(1, bert.num_hidden_layers // 2)
        layers = default_layers(bert.num_hidden_layers, num_layers)
    else:
        layers = config.init
    student = DistilBertForMaskedLM(_student_config(bert, len(layers), config))
    if config.init == "random":
        reinitialise(student, seed)
    else:
        copy_layers(teacher.model, student, layers)
    return student.train()


def default_layers(num_teacher_layers: int, num_layers: int) -> tuple[int, ...]:
    """Which teacher layers a student starts from: the authors' six of twelve, else evenly spaced.

    Half the layers means every other one.
    """
    if num_layers > num_teacher_layers:
        raise RunError(
            f"student.num_layers {num_layers} is more than the teacher's {num_teacher_layers}; "
            "ask for fewer, or set student.init: random"
        )
    if (num_teacher_layers, num_layers) == (12, 6):
        return _PAPER_LAYERS
    return tuple(i * num_teacher_layers // num_layers for i in range(num_layers))


@torch.no_grad()
def copy_layers(
    teacher: BertForMaskedLM, student: DistilBertForMaskedLM, layers: tuple[int, ...]
) -> None:
    """Copy embeddings, the given layers (from 0) and the whole MLM head into the student.

    A DistilBERT has no token-type embeddings; the teacher always sees type 0, so its row 0 is added
    to every position and the student's embedding output equals the teacher's from the start. (The
    original drops it.)
    """
    bad = [layer for layer in layers if not 0 <= layer < len(teacher.bert.encoder.layer)]
    if bad:
        raise RunError(
            f"student.init: the teacher has layers 0 to {len(teacher.bert.encoder.layer) - 1}, "
            f"not {bad[0]}"
        )
    source, target = teacher.bert.embeddings, student.distilbert.embeddings
    target.word_embeddings.load_state_dict(source.word_embeddings.state_dict())
    target.LayerNorm.load_state_dict(source.LayerNorm.state_dict())
    types = source.token_type_embeddings.weight[0]
    target.position_embeddings.weight.copy_(source.position_embeddings.weight + types)
    for block, layer in zip(student.distilbert.transformer.layer, layers, strict=True):
        for ours, theirs in _block_pairs(block, teacher.bert.encoder.layer[layer]):
            ours.load_state_dict(theirs.state_dict())
    head = teacher.cls.predictions
    student.vocab_transform.load_state_dict(head.transform.dense.state_dict())
    student.vocab_layer_norm.load_state_dict(head.transform.LayerNorm.state_dict())
    student.vocab_projector.bias.copy_(head.decoder.bias)


def build_bert(config: Model, manifest: Manifest, seed: int) -> BertForMaskedLM:
    """A randomly initialised BERT for `objective: mlm`, over the shards' vocabulary."""
    check_row_length("model", config.max_position_embeddings, manifest)
    bert = BertConfig(  # type: ignore[call-arg]  # any PreTrainedConfig takes it
        vocab_size=manifest.tokenizer.vocab_size,
        pad_token_id=manifest.tokenizer.special_ids.pad,
        attn_implementation=IMPLEMENTATION,
        **config.model_dump(),
    )
    model = BertForMaskedLM(bert)
    reinitialise(model, seed)
    return model.train()


@torch.no_grad()
def reinitialise(model: nn.Module, seed: int) -> None:
    """BERT's initialisation (normal 0.02, biases 0, LayerNorm 1 and 0) from a seed of its own.

    A generator of its own, parameter by parameter in name order, so that nothing else that draws
    random numbers changes a run's first weights.
    """
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in sorted(model.named_parameters()):
        if parameter.dim() > 1:
            parameter.normal_(0.0, 0.02, generator=generator)
        else:
            parameter.fill_(1.0 if name.lower().endswith("norm.weight") else 0.0)


def load_student(folder: Path) -> DistilBertForMaskedLM | BertForMaskedLM:
    """A student or MLM-trained BERT as a run saved it, in fp32."""
    raw = _read_config(str(folder), str(folder), None)
    kind = BertForMaskedLM if raw.get("model_type") == "bert" else DistilBertForMaskedLM
    try:
        model = kind.from_pretrained(
            folder, dtype=torch.float32, attn_implementation=IMPLEMENTATION
        )
    except (OSError, ValueError, RuntimeError) as error:
        raise RunError(f"{folder}: {_first_line(error)}") from error
    return model


def parameters_sha256(model: nn.Module) -> str:
    """A digest of names and values of all parameters: two models agree on it only if equal."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


def _student_config(bert: BertConfig, num_layers: int, config: Student) -> DistilBertConfig:
    if bert.layer_norm_eps != 1e-12:
        raise RunError(
            f"the teacher's layer_norm_eps is {bert.layer_norm_eps}; DistilBERT fixes it at 1e-12, "
            "so its layers cannot be copied"
        )
    return DistilBertConfig(  # type: ignore[call-arg]
        vocab_size=bert.vocab_size,
        max_position_embeddings=bert.max_position_embeddings,
        n_layers=num_layers,
        n_heads=bert.num_attention_heads,
        dim=bert.hidden_size,
        hidden_dim=bert.intermediate_size,
        activation=bert.hidden_act,
        dropout=config.dropout,
        attention_dropout=config.attention_dropout,
        pad_token_id=bert.pad_token_id,
        attn_implementation=IMPLEMENTATION,
    )


def _continue_from(folder: Path, config: Student, bert: BertConfig) -> DistilBertForMaskedLM:
    if not (folder / "config.json").is_file():
        raise RunError(
            f"student.init: {folder} is no folder with a config.json; give a DistilBERT's folder, "
            "a list of teacher layers, teacher or random"
        )
    model = load_student(folder)
    if not isinstance(model, DistilBertForMaskedLM):
        raise RunError(f"student.init: {folder} holds a {model.config.model_type}, no DistilBERT")
    wanted = {"vocab_size": bert.vocab_size, "dim": bert.hidden_size}
    if config.num_layers is not None:
        wanted["n_layers"] = config.num_layers
    for key, value in wanted.items():
        if getattr(model.config, key) != value:
            raise RunError(
                f"student.init: {folder} has {key} {getattr(model.config, key)}, but this run "
                f"needs {value} (the losses compare student and teacher position by position)"
            )
    for name, module in model.named_modules():
        if isinstance(module, nn.Dropout):
            module.p = config.attention_dropout if "attention" in name else config.dropout
    model.config.dropout = config.dropout
    model.config.attention_dropout = config.attention_dropout
    return model.train()


def _block_pairs(block: Any, layer: Any) -> list[tuple[nn.Module, nn.Module]]:
    attention = layer.attention
    return [
        (block.attention.q_lin, attention.self.query),
        (block.attention.k_lin, attention.self.key),
        (block.attention.v_lin, attention.self.value),
        (block.attention.out_lin, attention.output.dense),
        (block.sa_layer_norm, attention.output.LayerNorm),
        (block.ffn.lin1, layer.intermediate.dense),
        (block.ffn.lin2, layer.output.dense),
        (block.output_layer_norm, layer.output.LayerNorm),
    ]


def _read_config(name: str, source: str, revision: str | None) -> dict[str, Any]:
    try:
        path = cached_file(source, "config.json", revision=revision)
    except (OSError, ValueError) as error:
        raise RunError(
            f"{name}: no folder with a config.json, and not to be had from the hub "
            f"({_first_line(error)})"
        ) from error
    try:
        raw: dict[str, Any] = json.loads(Path(str(path)).read_text(encoding="utf-8"))
    except ValueError as error:
        raise RunError(f"{path}: not valid JSON ({error})") from error
    return raw


def _refuse_config(name: str, raw: dict[str, Any]) -> None:
    """No code, no attention override, and nothing but a BERT (old configs name no model_type)."""
    for key in raw:
        if key == "auto_map" or key.startswith("_attn_implementation"):
            raise RunError(f"teacher {name}: its config.json holds {key!r}, which could run code")
    if raw.get("model_type", "bert") != "bert":
        raise RunError(
            f"teacher {name}: a {raw['model_type']} cannot be a teacher here; objective distilbert "
            "takes a BERT with a masked-language-model head"
        )


def _check_vocabulary(
    name: str, source: str, revision: str | None, model: BertForMaskedLM, manifest: Manifest
) -> None:
    size = manifest.tokenizer.vocab_size
    if model.config.vocab_size != size:
        raise RunError(
            f"teacher {name}: it knows {model.config.vocab_size} words, the shards were made with "
            f"{size}; prepare the corpus with the teacher's tokenizer"
        )
    words = _vocabulary(source, revision)
    if words is None:
        return  # weights without tokenizer files: the size is all there is to compare
    if vocabulary_sha256(words) != manifest.tokenizer.vocabulary_sha256:
        raise RunError(
            f"teacher {name}: its vocabulary has the shards' size but other words; prepare the "
            "corpus with the teacher's tokenizer"
        )


def _vocabulary(source: str, revision: str | None) -> list[str] | None:
    """The words in id order, from vocab.txt or else the tokenizer; None where there is neither."""
    folder = Path(source)
    if folder.is_dir():
        if (folder / "vocab.txt").is_file():
            return (folder / "vocab.txt").read_text(encoding="utf-8").rstrip("\n").split("\n")
        if not (folder / "tokenizer.json").is_file():
            return None
    tokenizer = AutoTokenizer.from_pretrained(source, revision=revision)
    ids: dict[str, int] = tokenizer.get_vocab()
    return sorted(ids, key=lambda word: ids[word])


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
