"""Read the folder of a model, and write one: the only way in, and the only way out.

A model is read from a run (its newest checkpoint), a checkpoint, an export or a hub. A run's
checkpoints have their own writer, in pretrain/checkpoint.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from huggingface_hub import ModelCard, snapshot_download
from torch import Tensor
from transformers import AutoModel, AutoModelForMaskedLM, PreTrainedModel

from data_prep.disk import hash_file
from data_prep.disk.made import beside
from data_prep.disk.replacing import writing_to
from data_prep.messages import warn
from data_prep.tokens.agreement import SETTINGS
from pretrain import RunError
from pretrain.checkpoint import Saved, read_newest
from pretrain.model.config_file import read_config
from pretrain.model.families import Family, MaskedLM, family_of
from pretrain.model.hub import config_file, not_there
from pretrain.model.loading import assemble, known_family
from pretrain.model.model_files import read_tensors
from pretrain.run_folder import is_run, no_checkpoint, taken

_TEXTS = ("config.json", "vocab.txt", "tokenizer.json", *SETTINGS)
# Of a folder of sentence-transformers; a pattern fits a whole path.
_SENTENCES = (
    *("modules.json", "sentence_*_config.json", "config_sentence_transformers.json"),
    *("[1-9]_*/config.json", "[1-9]_*/model.safetensors"),
)
_NEW = 10  # seconds
_TOLERANCE = 1e-5  # largest difference of outputs after reading back
Result = TypeVar("Result")


@dataclass(frozen=True)
class Loaded:
    """Hold a model in fp32, and where it was read."""

    model: MaskedLM
    has_head: bool  # a trained one; otherwise it is the same random one at every call
    folder: Path  # its run may remove it at any time
    saved: Saved | None  # the checkpoint that it is the student of
    commit: str | None  # set for a hub's model


def read_model(
    name: str,
    read: Callable[[Loaded], Result],
    *,
    who: str = "",
    needs_head: bool = True,
    of_task: bool = False,
    changes: Callable[[Family], Mapping[str, float]] | None = None,
    warn: Callable[[str], None] = warn,
) -> Result:
    """Return the result of `read` on a model.

    If a run removes its checkpoint meanwhile, the newest one is read again.

    Args:
        name: a folder, a hub's name or `name@revision`.
        read: takes what it needs of the folder.
        who: the beginning of an error's message; `name` by default.
        needs_head: refuse a model without a trained LM head.
        of_task: `read` takes the head of a task itself.
        changes: returns other values for keys of a family's config.json.
        warn: receives checkpoints that do not verify.

    Raises:
        RunError: it cannot be read, could run code, is of no known family, or has no such head.
    """
    who = who or name
    place, commit = fetch(who, name)

    def load(folder: Path, saved: Saved | None) -> Result:
        raw = read_config(who, folder)
        family = known_family(who, raw)
        tensors = read_tensors(who, folder, pickled=saved is None)
        raw |= changes(family) if changes is not None else {}
        model, has_head = assemble(
            who, family, raw, tensors, needs_head=needs_head, of_task=of_task
        )
        return read(Loaded(model, has_head, folder, saved, commit))

    return newest(place, load, warn)


def load_model(folder: Path, *, needs_head: bool = True) -> MaskedLM:
    """Return a model that this project wrote, which is never a pickle, in fp32."""
    who = str(folder)
    raw = read_config(who, folder)
    family, tensors = known_family(who, raw), read_tensors(who, folder)
    return assemble(who, family, raw, tensors, needs_head=needs_head)[0]


def newest(
    folder: Path,
    read: Callable[[Path, Saved | None], Result],
    warn: Callable[[str], None] = warn,
) -> Result:
    """Return the result of `read` on a model's folder and its checkpoint, None if it has none.

    Of a run's output it is the student in its newest checkpoint. If the run removes that
    meanwhile, the newest one is read again.

    Raises:
        RunError: no checkpoint verifies, or the run has none.
    """
    found = read_newest(
        folder / "checkpoints", lambda saved: read(saved.folder / "student", saved), warn
    )
    if found is not None:
        return found[1]
    if is_run(folder):
        raise no_checkpoint(folder)
    return read(folder, None)


def fetch(who: str, name: str) -> tuple[Path, str | None]:
    """Return (folder, None) of a local model, or (cached folder, commit) of a hub's.

    No code is downloaded, and pickled weights only if there are no others.

    Args:
        who: the beginning of an error's message.
        name: a path, or a hub's name or `name@revision`.
    """
    if Path(name).is_dir():  # its name may contain an @
        return Path(name), None
    source, _, revision = name.partition("@")
    try:
        for weights in ("model*.safetensors*", "pytorch_model*.bin*"):
            patterns = [*_TEXTS, *_SENTENCES, weights]
            folder = Path(
                snapshot_download(source, revision=revision or None, allow_patterns=patterns)
            )
            if any(folder.glob(weights)):
                break
    except Exception as error:  # hub, proxy and network raise unrelated classes
        raise not_there(who, error) from error
    return folder, folder.name


def model_config(who: str, name: str) -> dict[str, Any]:
    """Return the config.json of a model; of a hub's nothing else is downloaded.

    Raises:
        RunError: it cannot be read, or could run code.
        OSError: the hub does not answer, or has no such name.
    """
    if Path(name).is_dir():
        return newest(Path(name), lambda folder, _: read_config(who, folder))
    return read_config(who, config_file(name).parent)


def write_model(
    model: PreTrainedModel,
    folder: Path,
    *,
    tensors: Mapping[str, Tensor],
    tokenizer: Mapping[str, bytes],
    card: ModelCard,
    extra: Callable[[Path], None] | None = None,
    same: Callable[[Path], Mapping[str, str]] | None = None,
) -> tuple[float, bool]:
    """Write a folder that plain transformers loads, and compare it when it is read back.

    It is written next to its place and then renamed: it is complete or absent.

    Args:
        model: in fp32 and evaluation mode.
        folder: missing or empty.
        tensors: of the file that the model came from, which the new file must hold, bit for bit.
        tokenizer: content of its files, by name.
        card: its README.md.
        extra: writes further files.
        same: maps a folder to what identifies its files. A folder with the same ones is kept.

    Returns:
        the largest difference of outputs between the model and what was read back, and whether a
        folder was kept.

    Raises:
        RunError: what is read back differs, or the folder is taken.
        OSError: the disk is full or read-only.
    """
    target = folder.resolve()
    with ExitStack() as stack:
        with writing_to(folder):
            temporary = stack.enter_context(beside(target))
            for name, data in tokenizer.items():
                (temporary / name).write_bytes(data)
            model.save_pretrained(temporary)
            # safetensors writes files for the owner only, config.json has the umask's mode.
            shutil.copymode(temporary / "config.json", temporary / "model.safetensors")
            card.save(temporary / "README.md")
            if extra is not None:
                extra(temporary)
        # Before the rename: what reads back differently never gets its name.
        compare_files(tensors, temporary)
        difference = read_back(model, temporary)
        other = ""
        if same is not None and target.is_dir() and any(target.iterdir()):
            there, new = same(target), same(temporary)
            differing = sorted(n for n in there.keys() | new if there.get(n) != new.get(n))
            if not differing:
                return difference, True
            other = f" with another {differing[0]}"
        try:
            temporary.rename(target)  # an empty folder is replaced, any other is an error
        except OSError as error:
            if not target.exists():
                raise
            raise taken(folder, other) from error
    return difference, False


def read_back(model: PreTrainedModel, folder: Path) -> float:
    """Return the largest difference of logits between a model and its folder, in fp32.

    Without a head it is that of the last hidden states.
    """
    # Plain transformers, as a user will load it, with another attention than ours.
    load: Any = type(model)  # with the head of a task
    if model.get_output_embeddings() is not None:
        load = AutoModelForMaskedLM
    elif model.base_model is model:
        load = AutoModel
    reloaded = load.from_pretrained(folder).eval()
    vocabulary = model.config.vocab_size
    length = min(32, family_of(model).row_length(model.config))
    # Fixed ids over the whole vocabulary; 7,919 is a prime, so neighbours are far apart.
    ids = torch.arange(4 * length).reshape(4, length) * 7919 % vocabulary
    mask = torch.ones_like(ids)
    with torch.no_grad():
        ours, theirs = (each(input_ids=ids, attention_mask=mask)[0] for each in (model, reloaded))
    difference = float((ours - theirs).abs().max())
    if not difference <= _TOLERANCE:
        raise RunError(
            f"{folder}: what was written reads back with logits off by {difference:.1e}; nothing "
            "was exported. Check the disk and the transformers version"
        )
    return difference


def compare_files(tensors: Mapping[str, Tensor], folder: Path) -> None:
    """Compare a folder's file with the tensors of the file that it came from, bit for bit.

    A model that was loaded wrongly would be written, and read back, just as wrongly.
    """
    written = read_tensors(str(folder), folder)
    for name, tensor in tensors.items():
        if name not in written or not torch.equal(written[name], tensor):
            raise RunError(
                f"{folder}: {name} is not as in the checkpoint; nothing was exported. Check the "
                "transformers version"
            )


def digests(folder: Path) -> dict[str, str]:
    """Return the hash of each file of a folder."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): hash_file(path)[0] for path in files}
