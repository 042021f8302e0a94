"""Load the teacher, a model with a trained MLM head, and compare it with the shards."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from data_prep.shards import Manifest
from pretrain.model.config_file import read_config
from pretrain.model.families import MaskedLM
from pretrain.model.folder import Loaded, read_model
from pretrain.model.loading import TooFewPositions, check_row_length, known_family
from pretrain.model.pooling import SentenceHead
from pretrain.model.sentences import read_head
from pretrain.model.vocabulary_file import DifferentTokenizer, check_tokenizer, read_tokenizer
from pretrain.run_folder import check_source


@dataclass(frozen=True)
class Teacher:
    """Hold a frozen model with a trained MLM head, and its name and digests."""

    model: MaskedLM
    name: str
    local: bool  # a folder of this machine
    revision: str | None  # the commit, where it came from a hub
    sha256: str  # hash of its parameters
    manifest: Manifest | None = None  # the shards that it was compared with
    tokenizer_json: str = ""  # content of the file; empty if there is none
    shards: Path | None = None  # that it was compared with
    note: str = ""  # what screen and card should say about it
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
    of_task: bool = False,
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
        of_task: the caller reads the task's head, so do not warn about its weights.
        any_vocabulary: accept a teacher with another tokenizer, which reads texts.

    Raises:
        RunError: it cannot be read, is of no supported family, has no trained MLM head, its
            tokenizer is not the shards', or its positions are fewer than a row's.
        CorpusError: the shards' tokenizer is damaged.
    """
    check_source("teacher", name)
    who = f"teacher {name}"

    def read(loaded: Loaded) -> Teacher:
        model, folder, saved, mismatch = loaded.model, loaded.folder, loaded.saved, ""
        try:
            required = shards is not None and not same_vocabulary
            check_tokenizer(who, folder, model.config, manifest, shards, required=required)
            check_row_length(who, model.config, manifest)
        except (DifferentTokenizer, TooFewPositions) as error:
            if not any_vocabulary and sentences:
                raise type(error)(
                    f"{error}, or with keep_text: true, and give `model:` in place of `student:`"
                ) from None
            if not any_vocabulary:
                raise
            mismatch = str(error).removeprefix(f"{who}: ").partition(";")[0]
        # Without dropout and gradients: the teacher is a function.
        model.eval().requires_grad_(False)
        unfinished = saved is not None and saved.step < int(saved.state["num_steps"])
        return Teacher(
            model,
            name,
            loaded.commit is None,
            loaded.commit,
            parameters_sha256(model),
            manifest,
            read_tokenizer(who, folder),
            shards,
            f"the teacher is an unfinished run, at step {saved.step:,} of "
            f"{saved.state['num_steps']:,}"
            if saved is not None and unfinished
            else "",
            read_head(who, folder, model.config.hidden_size) if sentences else None,
            mismatch,
        )

    return read_model(name, read, who=who, needs_head=needs_head, of_task=of_task)


def parameters_sha256(model: nn.Module) -> str:
    """Return a checksum of names and values of all parameters."""
    digest = hashlib.sha256()
    # By name, so that the order of registration does not matter.
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


def check_fit(
    who: str,
    folder: Path,
    manifest: Manifest,
    *,
    shards: Path | None = None,
    required: bool = True,
) -> None:
    """Refuse a model whose vocabulary or positions are not those of shards; no weights are read.

    Args:
        who: the beginning of the message.
        folder: of the model.
        manifest: of the shards.
        shards: their folder, to compare the two tokenizers on a text.
        required: refuse a folder without tokenizer files.
    """
    raw = read_config(who, folder)
    family = known_family(who, raw)
    config = family.completed(family.config.from_dict(raw))
    check_tokenizer(who, folder, config, manifest, shards, required=required)
    check_row_length(who, config, manifest)
