"""Load the teacher, a model with a trained MLM head, and compare it with the shards."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from data_prep.shards import CorpusError, Manifest, vocabulary_sha256
from data_prep.tokens.comparison import difference
from pretrain import RunError
from pretrain.model.families import MaskedLM
from pretrain.model.loading import assemble, check_row_length, known_family
from pretrain.model.model_files import fetch, read_config, read_tensors, read_words
from pretrain.model.pooling import SentenceHead
from pretrain.model.sentences import read_head
from pretrain.output import check_source


@dataclass(frozen=True)
class Teacher:
    """Hold a frozen model with a trained MLM head, and its name and digests."""

    model: MaskedLM
    name: str
    local: bool  # a folder of this machine
    revision: str | None  # the commit, where it came from a hub
    sha256: str  # of its parameters
    manifest: Manifest | None = None  # of the shards that it was compared with
    folder: Path = Path()
    head: SentenceHead | None = None  # makes its sentence vectors
    mismatch: str = ""  # why it cannot read the shards' ids; empty if it can

    @property
    def reads_ids(self) -> bool:
        """Return whether its vocabulary is that of the shards."""
        return not self.mismatch

    @property
    def public_name(self) -> str:
        """Return its name; empty for a folder of this machine."""
        return "" if self.local else self.name


def load_teacher(
    name: str,
    manifest: Manifest,
    shards: Path | None = None,
    *,
    same_vocabulary: bool = False,
    needs_head: bool = True,
    sentences: bool = False,
    any_vocabulary: bool = False,
) -> Teacher:
    """Load a teacher from a folder, a hub name or `name@revision`, and compare it with the shards.

    Args:
        name: the teacher.
        manifest: of the shards.
        shards: their folder, to compare the two tokenizers on a text.
        same_vocabulary: accept a teacher without tokenizer files, or with a tokenizer that encodes
            a text differently.
        needs_head: refuse a teacher without a trained MLM head.
        sentences: also read the modules that make its sentence vectors.
        any_vocabulary: accept a teacher with another tokenizer, which reads texts.

    Raises:
        RunError: it cannot be read, is of no supported family, has no trained MLM head, its
            tokenizer is not the shards', or its positions are fewer than a row's.
        CorpusError: the shards' tokenizer is damaged.
    """
    check_source("teacher", name)
    who = f"teacher {name}"
    # A path may contain an @, so an existing path is never split.
    source, _, revision = (name, "", "") if Path(name).exists() else name.partition("@")
    folder, commit = fetch(who, source, revision or None)
    raw = read_config(who, folder)
    family = known_family(who, raw)
    tensors = read_tensors(who, folder, pickled=True)
    model, _ = assemble(who, family, raw, tensors, needs_head=needs_head)
    mismatch = ""
    try:
        check_tokenizer(who, folder, model, manifest, None if same_vocabulary else shards)
    except RunError as error:
        if not any_vocabulary:
            raise
        mismatch = str(error).removeprefix(f"{who}: ").partition(";")[0]
    # Without dropout and gradients: the teacher is a function.
    model.eval().requires_grad_(False)
    return Teacher(
        model,
        name,
        commit is None,
        commit,
        parameters_sha256(model),
        manifest,
        folder,
        read_head(who, folder, model.config.hidden_size) if sentences else None,
        mismatch,
    )


def check_tokenizer(
    who: str, folder: Path, model: MaskedLM, manifest: Manifest, shards: Path | None
) -> None:
    """Refuse a teacher that cannot read the ids of the shards."""
    # First the vocabulary, then whole texts: the same tokens may still be cut differently (case,
    # accents).
    check_vocabulary(who, folder, model.config, manifest, required=shards is not None)
    if shards is not None:
        try:
            found = difference(folder, shards, manifest)
        except CorpusError as error:
            raise RunError(f"{who}: its tokenizer cannot be compared ({error})") from None
        if found:
            raise RunError(
                f"{who}: its tokenizer is not that of the shards: {found}; prepare the corpus with "
                "its tokenizer, or set `teacher_vocabulary: same` (distil evaluate: "
                "--same-vocabulary) if the shards are as you want them"
            )
    check_row_length(who, model.config, manifest)


def parameters_sha256(model: nn.Module) -> str:
    """Return a checksum of names and values of all parameters."""
    digest = hashlib.sha256()
    # By name, so that the order of registration does not matter.
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


def check_vocabulary(
    who: str, folder: Path, config: Any, manifest: Manifest, *, required: bool = True
) -> None:
    """Refuse a model whose vocabulary is not that of the shards.

    Args:
        who: the beginning of the message.
        folder: of the model.
        config: its config.
        manifest: of the shards.
        required: refuse a folder without tokenizer files; otherwise compare size and padding.
    """
    tokenizer = manifest.tokenizer
    if config.vocab_size != tokenizer.vocab_size:
        raise RunError(
            f"{who}: its vocabulary has {config.vocab_size} tokens, that of the shards "
            f"{tokenizer.vocab_size}; prepare the corpus with its tokenizer"
        )
    words = read_words(who, folder)
    if words is None and required:
        raise RunError(
            f"{who}: no vocab.txt or tokenizer.json, so its vocabulary cannot be compared with the "
            "shards'; add its tokenizer files, or, for a run's teacher whose tokenizer the corpus "
            "was prepared with, set `teacher_vocabulary: same` (distil evaluate: --same-vocabulary)"
        )
    if words and vocabulary_sha256(words.vocabulary) != tokenizer.vocabulary_sha256:
        raise RunError(
            f"{who}: its vocabulary has the shards' size but other tokens; prepare the corpus with "
            "its tokenizer"
        )
    # Equal vocabularies may still use a token for another role.
    special = [] if config.pad_token_id is None else [("pad", config.pad_token_id)]
    for role, id in [*special, *(words.special_ids.items() if words else ())]:
        expected = getattr(tokenizer.special_ids, role)
        if id != expected:
            raise RunError(
                f"{who}: its {role} token has id {id}, the shards' has {expected}; prepare the "
                "corpus with its tokenizer"
            )
