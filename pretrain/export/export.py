"""Write a run's student as a folder that plain `transformers` loads, and upload it."""

from __future__ import annotations

import json
import shutil
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import HfApi
from torch import Tensor
from transformers import AutoModel, AutoModelForMaskedLM, PreTrainedModel

from data_prep.disk import hash_file
from pretrain import RunError, checkpoint
from pretrain.checkpoint import Saved
from pretrain.encoders import MEASURED
from pretrain.export.arguments import check_target, target_taken
from pretrain.export.card import model_card
from pretrain.files import writing_to
from pretrain.model import tokenizer_files
from pretrain.model.families import MaskedLM, family_of
from pretrain.model.loading import load_model, reinitialise
from pretrain.model.model_files import first_line, read_tensors
from pretrain.objectives.known import objective_of, task_of
from pretrain.run_folder import no_checkpoint

_TOLERANCE = 1e-5
Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Exported:
    """Hold the figures of an export."""

    architecture: str
    step: int
    num_parameters: int
    num_bytes: int
    difference: float  # largest difference of logits to the run's student, read back


def export(
    run: Path, folder: Path, warn: Callable[[str], None], *, again: bool = False
) -> Exported:
    """Write the newest checkpoint's student to `folder`, and compare it when read back.

    The layout is that of `distilbert-base-uncased` (or a BERT's, for objective mlm). All files
    are written to a folder next to the target, which is then renamed: an export is complete or
    absent.

    Args:
        run: the output folder of a run, which may continue meanwhile.
        folder: the target; missing or empty.
        warn: receives newer checkpoints that do not verify or were removed by the run.
        again: accept a target that already has exactly the same files.

    Raises:
        RunError: there is no checkpoint, the folder is taken, or the logits differ.
        OSError: the disk is full or read-only.
    """
    check_target(run, folder, again=again)
    target = folder.resolve()
    # A unique name: another export may be writing to the same target.
    temporary = target.with_name(f".tmp-{target.name}-{uuid.uuid4().hex[:8]}")

    def load_saved(saved: Saved) -> tuple[MaskedLM, dict[str, bytes], Tensors, Tensors]:
        # Whether it has a head, the run's objective says.
        student = saved.folder / "student"
        model = load_model(student, needs_head=False).eval()
        tokenizer = tokenizer_files.of_checkpoint(
            student, family_of(model).row_length(model.config)
        )
        return model, tokenizer, saved.adapters(), read_tensors(str(student), student)

    try:
        found = checkpoint.read_newest(run / "checkpoints", load_saved, warn)
        if found is None:
            raise no_checkpoint(run)
        saved, (model, tokenizer, adapters, tensors) = found
        objective, seed = objective_of(saved.state), saved.state["config"]["train"]["seed"]
        student: Any = model if objective.needs_logits else body(model, seed)
        with writing_to(folder):
            temporary.mkdir(parents=True)
            for name, data in tokenizer.items():
                (temporary / name).write_bytes(data)
            student.save_pretrained(temporary)
            # safetensors writes files for the owner only, config.json has the umask's mode.
            shutil.copymode(temporary / "config.json", temporary / "model.safetensors")
            kept = run / MEASURED
            measured = json.loads(kept.read_bytes()) if kept.exists() else {}
            model_card(student, saved.state, measured).save(temporary / "README.md")
            task_of(saved.state).export(
                temporary, student.config.hidden_size, saved.state, adapters
            )
        # Before the rename: an export that reads back differently never gets its name.
        compare_files(tensors, temporary)
        difference = read_back(student, temporary)
        if not (again and target.is_dir() and _hashes(target) == _hashes(temporary)):
            try:
                temporary.rename(target)  # an empty folder is replaced, any other is an error
            except OSError as error:
                if not target.exists():
                    raise
                hint = ", or upload it as it is with `hf upload`" if again else ""
                raise target_taken(folder, hint) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return Exported(
        architecture=type(student).__name__,
        step=saved.step,
        num_parameters=sum(p.numel() for p in student.parameters()),
        num_bytes=(folder / "model.safetensors").stat().st_size,
        difference=difference,
    )


def body(model: MaskedLM, seed: int) -> PreTrainedModel:
    """Return a model without its LM head, with all that `AutoModel` looks for.

    BERT and RoBERTa have a pooler there, which no term reaches. It gets random weights, the same in
    every export of a run: `AutoModel` would draw its own, and warn about them.
    """
    trained: Any = model.base_model
    # By default the class has its pooler; the body of a model with a head was made without one.
    whole: PreTrainedModel = type(trained)(trained.config)
    reinitialise(whole, seed)
    whole.load_state_dict({**whole.state_dict(), **trained.state_dict()})
    return whole.eval()


def push(folder: Path, repository: str, token: str) -> str:
    """Upload an export to a hub.

    Raises:
        RunError: the hub refused, or cannot be reached.
    """
    api = HfApi(token=token)
    try:
        api.create_repo(repository, exist_ok=True)
        commit = api.upload_folder(repo_id=repository, folder_path=folder)
    except Exception as error:  # the HTTP library, the hub and its transfer library differ
        reason = first_line(error).replace(token, "***")
        raise RunError(
            f"{folder} is written, but not uploaded to {repository}: {reason}; the same command "
            f"tries again (once the run has gone on, `hf upload {repository} {folder}` does)"
        ) from None
    return f"uploaded to {repository} ({commit.oid[:12]})"


def read_back(student: PreTrainedModel, folder: Path) -> float:
    """Return the largest difference of logits between the student and its export, in fp32.

    Without an LM head it is that of the last hidden states.
    """
    # Plain transformers, as a user will load it, with another attention than ours.
    has_head = student.get_output_embeddings() is not None
    load: Any = AutoModelForMaskedLM if has_head else AutoModel
    reloaded = load.from_pretrained(folder).eval()
    vocabulary = student.config.vocab_size
    length = min(32, family_of(student).row_length(student.config))
    # Fixed ids over the whole vocabulary; 7,919 is a prime, so neighbours are far apart.
    ids = torch.arange(4 * length).reshape(4, length) * 7919 % vocabulary
    mask = torch.ones_like(ids)
    with torch.no_grad():
        name = "logits" if has_head else "last_hidden_state"
        outputs = [model(input_ids=ids, attention_mask=mask) for model in (student, reloaded)]
        ours, theirs = (getattr(output, name) for output in outputs)
    difference = float((ours - theirs).abs().max())
    if not difference <= _TOLERANCE:
        raise RunError(
            f"{folder}: what was written reads back with logits off by {difference:.1e}; nothing "
            "was exported. Check the disk and the transformers version"
        )
    return difference


def compare_files(tensors: Tensors, folder: Path) -> None:
    """Compare an export's file with the tensors of the checkpoint's file, bit for bit.

    A model that was loaded wrongly would be written, and read back, just as wrongly.
    """
    written = read_tensors(str(folder), folder)
    for name, tensor in tensors.items():
        if name not in written or not torch.equal(written[name], tensor):
            raise RunError(
                f"{folder}: {name} is not as in the checkpoint; nothing was exported. Check the "
                "transformers version"
            )


def _hashes(folder: Path) -> dict[str, str]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): hash_file(path)[0] for path in files}
