"""Build the student: from the teacher's layers, at random, or from a folder; or a new BERT."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DistilBertForMaskedLM

from data_prep.messages import first_line
from data_prep.shards import Manifest
from pretrain import RunError
from pretrain.contracts.terms import Sizes
from pretrain.model.architectures import student_sizes
from pretrain.model.families import FAMILIES, Family, MaskedLM, family_of
from pretrain.model.families.bert import Bert
from pretrain.model.families.distil_bert import DistilBert
from pretrain.model.folder import Loaded, read_model
from pretrain.model.loading import check_row_length, reinitialise
from pretrain.model.model_config import Model, Student
from pretrain.model.teacher import Teacher, parameters_sha256
from pretrain.model.vocabulary_file import check_tokenizer
from pretrain.model.word_vectors import read_vectors
from pretrain.plan import default_layers
from pretrain.run_folder import check_source

_SIZES = ("hidden_size", "num_attention_heads", "intermediate_size")
NEW_HEAD = "it had no trained masked-language-model head: it got a new one, tied to its embeddings"


def build_student(
    config: Student,
    teacher: Teacher,
    seed: int,
    *,
    needs_head: bool = True,
    of_task: bool = False,
    notes: list[str] | None = None,
) -> MaskedLM:
    """Build the student of a config, in fp32 and in training mode.

    Without `needs_head` its LM head is never trained, so `init` may be a folder without one; with
    `of_task` the head of a task is read by others. What
    screen and card should say about its weights is appended to `notes`.

    Raises:
        RunError: the teacher lacks a layer, sizes do not fit, or the folder does not fit it.
    """
    notes = [] if notes is None else notes
    theirs, kind = teacher.model.config, teacher.model.config.model_type
    given = Sizes.of(theirs.to_dict())
    assert given is not None
    continues = isinstance(config.init, str) and config.init not in ("teacher", "random")
    copies = config.model_copy(update={"init": "random"}) if continues else config
    planned = student_sizes(copies, given)
    architecture, num_layers = planned.family, planned.num_hidden_layers
    family = FAMILIES[architecture]
    sizes = {name: getattr(config, name) for name in _SIZES if getattr(config, name) is not None}
    vectors = None
    if not family.attends and not continues:
        vectors = read_vectors(config, teacher)
        sizes = {n: getattr(planned, n) for n in ("hidden_size", "intermediate_size")}
        width = config.word_vectors or 300 if vectors is None else vectors.width
        sizes |= {"embedding_size": width, "fixed_vectors": vectors is not None}
        if teacher.manifest is not None and teacher.manifest.pairs:
            sizes |= {"siamese": True, "sep_token_id": teacher.manifest.tokenizer.special_ids.sep}
    if continues:
        if config.num_layers is not None:
            sizes["num_hidden_layers"] = config.num_layers
        init = str(config.init)
        check_source("student.init", init)

        def continued(loaded: Loaded) -> MaskedLM:
            model = _continued(init, loaded, teacher, family, sizes)
            notes.append(f"the student began from {described(init, loaded)}")
            return model

        # A folder's own dropout is replaced by this config's, in its layers and its config.json.
        return read_model(
            init,
            continued,
            who=f"student.init {init}",
            needs_head=needs_head,
            changes=lambda theirs: theirs.rates(config.dropout, config.attention_dropout),
            of_task=of_task,
        )

    layers: tuple[int, ...] = ()  # the teacher's layers that it starts from
    if config.init == "teacher":
        period = family.period(theirs) if architecture == kind else 1
        layers = default_layers(theirs.num_hidden_layers, num_layers, period)
    elif isinstance(config.init, tuple):
        layers = config.init

    # Build it, and fill it.
    rates = family.rates(config.dropout, config.attention_dropout)
    changes = {"num_hidden_layers": num_layers, **sizes, **rates}
    try:
        student = family.architecture(family.student_config(theirs, changes, layers))
    except ValueError as error:  # the width is not a multiple of the number of heads
        raise RunError(f"student: its sizes cannot be used ({first_line(error)})") from error
    numbers = " and ".join(", ".join(map(str, layers)).rsplit(", ", 1))
    begun = f"the teacher's layer{'s' if len(layers) > 1 else ''} {numbers}"
    notes.append(f"the student began from {begun if layers else 'random weights'}")
    if not layers:
        reinitialise(student, seed)
        family.initialise(student, seed)
        if vectors is not None:
            notes.append(vectors.put(student.bilstm))
    elif architecture == kind:
        copy_same(teacher.model, student, layers)
    else:
        copy_layers(teacher.model, student, layers)
    trained: MaskedLM = student.train()
    return trained


def copy_same(teacher: MaskedLM, student: MaskedLM, layers: tuple[int, ...]) -> None:
    """Copy everything of a model of the same family, with the given layers (from 0)."""
    ours, weights = student.state_dict(), teacher.state_dict()
    prefix = family_of(teacher).layer_prefix
    found: dict[str, Tensor] = {}
    for i, layer in enumerate(layers):
        names, theirs = (
            {name.removeprefix(begin) for name in state if name.startswith(begin)}
            for begin, state in ((f"{prefix}{i}.", ours), (f"{prefix}{layer}.", weights))
        )
        # ModernBERT's first layer has no norm before attention, so it cannot be another layer.
        if odd := sorted(names ^ theirs):
            raise RunError(
                f"student.init: the teacher's layer {layer} cannot be the student's layer {i}, "
                f"because only one of these layers has {odd[0]}; list layer 0 first, and only there"
            )
        found |= {f"{prefix}{i}.{name}": weights[f"{prefix}{layer}.{name}"] for name in names}
    student.load_state_dict({name: weights[name] for name in ours.keys() - found.keys()} | found)


@torch.no_grad()
def copy_layers(teacher: MaskedLM, student: DistilBertForMaskedLM, layers: tuple[int, ...]) -> None:
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
    theirs: Any = teacher
    bert, ours = theirs.bert.embeddings, student.distilbert.embeddings
    ours.word_embeddings.load_state_dict(bert.word_embeddings.state_dict())
    ours.LayerNorm.load_state_dict(bert.LayerNorm.state_dict())
    types = bert.token_type_embeddings.weight[0]
    ours.position_embeddings.weight.copy_(bert.position_embeddings.weight + types)
    for i, layer in enumerate(layers):
        pairs = zip(DistilBert().parts(student, i), Bert().parts(teacher, layer), strict=True)
        for target, source in pairs:
            if isinstance(target, nn.Linear | nn.LayerNorm) and isinstance(source, nn.Module):
                target.load_state_dict(source.state_dict())
    head = theirs.cls.predictions
    student.vocab_transform.load_state_dict(head.transform.dense.state_dict())
    student.vocab_layer_norm.load_state_dict(head.transform.LayerNorm.state_dict())
    student.vocab_projector.bias.copy_(head.decoder.bias)


def build_model(
    config: Model,
    manifest: Manifest,
    seed: int,
    notes: list[str],
    *,
    needs_head: bool = True,
    of_task: bool = False,
    shards: Path | None = None,
) -> MaskedLM:
    """Build the model of the section `model`: a random one, or one to continue from.

    What screen and card should say about its weights is appended to `notes`. Without `needs_head`
    its LM head is never trained.

    Raises:
        RunError: the model to continue cannot be read, or does not fit the shards.
    """
    dropouts = config.hidden_dropout_prob, config.attention_probs_dropout_prob
    if config.init is None:
        family = FAMILIES[config.architecture]
        sizes = {name: getattr(config, name) for name in (*_SIZES, "num_hidden_layers")}
        sizes["max_position_embeddings"] = config.max_position_embeddings
        tokenizer = manifest.tokenizer
        settings = family.new_config(
            {**sizes, **family.rates(*dropouts), "vocab_size": tokenizer.vocab_size},
            tokenizer.special_ids.model_dump(),
        )
        check_row_length("model", settings, manifest)
        model: MaskedLM = family.architecture(settings)
        reinitialise(model, seed)
        return model.train()
    # To continue: its folder is read as carefully as a teacher's.
    init, who = config.init, f"model.init {config.init}"

    def read(loaded: Loaded) -> MaskedLM:
        check_tokenizer(who, loaded.folder, loaded.model.config, manifest, shards)
        notes.append(f"the model began from {described(init, loaded)}")
        if needs_head and not loaded.has_head:
            notes.append(NEW_HEAD)
        trained: MaskedLM = loaded.model.train()
        return trained

    return read_model(
        init,
        read,
        who=who,
        needs_head=False,
        of_task=of_task,
        changes=lambda theirs: theirs.rates(*dropouts),
    )


def described(name: str, loaded: Loaded) -> str:
    """Say where the weights of a model come from, without a path of this machine."""
    if loaded.commit is not None:
        return f"{name.partition('@')[0]} at revision {loaded.commit}"
    # A published card names no folder, so that a checksum says which weights they were.
    saved = loaded.saved
    origin = f"step {saved.step} of another run" if saved is not None else "a local model"
    return f"{origin} (weights sha256 {parameters_sha256(loaded.model)[:16]})"


def _continued(
    init: str, loaded: Loaded, teacher: Teacher, family: Family, sizes: dict[str, int]
) -> MaskedLM:
    model = loaded.model
    if model.config.model_type != family.model_type:
        same = model.config.model_type == teacher.model.config.model_type
        fix = "set student.architecture: same" if same else f"take a {family.model_type}"
        raise RunError(
            f"student.init: {init} holds a {model.config.model_type}, no {family.model_type}; {fix}"
        )
    # Its width is its own: a term that needs the teacher's refuses a different one. So is the
    # padding of its vocabulary, whose tokens are compared below.
    for name, size in sizes.items():
        own_name = family.own_names.get(name, name)
        if getattr(model.config, own_name) != size:
            raise RunError(
                f"student.init: {init} has {own_name} {getattr(model.config, own_name)}, but "
                f"this run needs {size}, as its teacher or `student:` has"
            )
    if teacher.manifest is not None:
        who = f"student.init {init}"
        check_tokenizer(who, loaded.folder, model.config, teacher.manifest, teacher.shards)
    return model.train()
