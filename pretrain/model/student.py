"""Build the student: from the teacher's layers, at random, or from a folder; or a new BERT."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import BertConfig, BertForMaskedLM, DistilBertConfig, DistilBertForMaskedLM

from data_prep.shards import Manifest
from pretrain import RunError
from pretrain.config import Model, Student
from pretrain.kernels.attention import IMPLEMENTATION
from pretrain.model.loading import check_row_length, load_model
from pretrain.model.model_files import student_of
from pretrain.model.teacher import Teacher, check_vocabulary

_PAPER_LAYERS = (0, 2, 4, 7, 9, 11)  # 12 -> 6, as in the authors' released code


def build_student(config: Student, teacher: Teacher, seed: int) -> DistilBertForMaskedLM:
    """Build the student of a config, in fp32 and in training mode.

    Raises:
        RunError: the teacher lacks a layer, or the folder does not fit it.
    """
    bert = teacher.model.config
    if isinstance(config.init, str) and config.init not in ("teacher", "random"):
        return _continue_from(Path(config.init), config, teacher)
    num_layers = config.num_layers or max(1, bert.num_hidden_layers // 2)
    if config.init == "random":
        student = DistilBertForMaskedLM(_student_config(bert, num_layers, config))
        reinitialise(student, seed)
        return student.train()
    if config.init == "teacher":
        layers = default_layers(bert.num_hidden_layers, num_layers)
    else:
        assert not isinstance(config.init, str)
        layers = config.init
    student = DistilBertForMaskedLM(_student_config(bert, len(layers), config))
    copy_layers(teacher.model, student, layers)
    return student.train()


def default_layers(num_teacher_layers: int, num_layers: int) -> tuple[int, ...]:
    """Return the teacher's layers that a student starts from.

    They are the authors' choice for six of twelve layers, and evenly spaced otherwise.
    """
    if num_layers > num_teacher_layers:
        raise RunError(
            f"student.num_layers {num_layers} is more than the teacher's {num_teacher_layers}; "
            "ask for fewer, or set student.init: random"
        )
    # Not evenly spaced: the last layer of the teacher is among them.
    if (num_teacher_layers, num_layers) == (12, 6):
        return _PAPER_LAYERS
    return tuple(i * num_teacher_layers // num_layers for i in range(num_layers))


@torch.no_grad()
def copy_layers(
    teacher: BertForMaskedLM, student: DistilBertForMaskedLM, layers: tuple[int, ...]
) -> None:
    """Copy embeddings, the given layers (from 0) and the whole MLM head into the student.

    A DistilBERT has no token-type embeddings; the teacher always sees type 0, so its row 0 is added
    to every position, and the student's embedding output equals the teacher's from the start. (The
    authors' code leaves it out.)
    """
    # Checked, because the copy would compute something slightly else without any error.
    if teacher.config.layer_norm_eps != 1e-12:
        raise RunError(
            f"the teacher's layer_norm_eps is {teacher.config.layer_norm_eps}; DistilBERT fixes it "
            "at 1e-12, so its layers cannot be copied; set student.init: random"
        )
    bad = [layer for layer in layers if not 0 <= layer < len(teacher.bert.encoder.layer)]
    if bad:
        raise RunError(
            f"student.init: the teacher has layers 0 to {len(teacher.bert.encoder.layer) - 1}, "
            f"not {bad[0]}"
        )
    bert, ours = teacher.bert.embeddings, student.distilbert.embeddings
    ours.word_embeddings.load_state_dict(bert.word_embeddings.state_dict())
    ours.LayerNorm.load_state_dict(bert.LayerNorm.state_dict())
    types = bert.token_type_embeddings.weight[0]
    ours.position_embeddings.weight.copy_(bert.position_embeddings.weight + types)
    block: Any
    theirs: Any
    for block, layer in zip(student.distilbert.transformer.layer, layers, strict=True):
        theirs = teacher.bert.encoder.layer[layer]
        for target, source in (
            (block.attention.q_lin, theirs.attention.self.query),
            (block.attention.k_lin, theirs.attention.self.key),
            (block.attention.v_lin, theirs.attention.self.value),
            (block.attention.out_lin, theirs.attention.output.dense),
            (block.sa_layer_norm, theirs.attention.output.LayerNorm),
            (block.ffn.lin1, theirs.intermediate.dense),
            (block.ffn.lin2, theirs.output.dense),
            (block.output_layer_norm, theirs.output.LayerNorm),
        ):
            target.load_state_dict(source.state_dict())
    head = teacher.cls.predictions
    student.vocab_transform.load_state_dict(head.transform.dense.state_dict())
    student.vocab_layer_norm.load_state_dict(head.transform.LayerNorm.state_dict())
    student.vocab_projector.bias.copy_(head.decoder.bias)


def build_bert(config: Model, manifest: Manifest, seed: int) -> BertForMaskedLM:
    """Build a randomly initialised BERT for `objective: mlm`, over the shards' vocabulary."""
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
    """Initialise as BERT does: normal 0.02, biases 0, LayerNorm weights 1."""
    # With a generator of its own, and parameters in name order, no other random number changes a
    # run's first weights.
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in sorted(model.named_parameters()):
        if parameter.dim() > 1:
            parameter.normal_(0.0, 0.02, generator=generator)
        else:
            parameter.fill_(1.0 if name.lower().endswith("norm.weight") else 0.0)


def _student_config(bert: BertConfig, num_layers: int, config: Student) -> DistilBertConfig:
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


def _continue_from(folder: Path, config: Student, teacher: Teacher) -> DistilBertForMaskedLM:
    bert = teacher.model.config
    folder = student_of(folder)
    if not (folder / "config.json").is_file():
        raise RunError(
            f"student.init: {folder} is not a folder with a config.json; give a DistilBERT's "
            "folder, a list of teacher layers, teacher or random"
        )
    model = load_model(folder)
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
    if teacher.manifest is not None:
        check_vocabulary(f"student.init: {folder}", folder, model.config, teacher.manifest)
    # A folder's own dropout is replaced by this config's, in the layers and in its config.json.
    for name, module in model.named_modules():
        if isinstance(module, nn.Dropout):
            module.p = config.attention_dropout if "attention" in name else config.dropout
    model.config.dropout = config.dropout
    model.config.attention_dropout = config.attention_dropout
    return model.train()
