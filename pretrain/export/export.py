"""Write a run's student as a folder that plain `transformers` loads, and upload it."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import transformers
from huggingface_hub import HfApi, ModelCard
from torch import Tensor
from transformers import PreTrainedModel

from data_prep.disk.json_files import parse_object
from data_prep.disk.replacing import replace_text
from data_prep.messages import first_line
from pretrain import RunError
from pretrain.export.asked import Onnx, check_target
from pretrain.export.card import About, model_card
from pretrain.export.owner_config import SHOWN
from pretrain.model import tokenizer_files
from pretrain.model.families import MaskedLM, family_of, has_types
from pretrain.model.folder import Loaded, model_config, read_model, write_model
from pretrain.model.loading import reinitialise
from pretrain.model.model_files import read_tensors
from pretrain.model.sentences import read_head
from pretrain.model.task_head import TaskHead, output_of, saved_head, with_head
from pretrain.monitor.figures import escaped
from pretrain.monitor.metrics import read_metrics
from pretrain.objectives.known import objective_of, task_of
from pretrain.run_folder import MEASURED, check_run, onnx_file
from pretrain.tasks.labelled.examples import own_head

Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Exported:
    """Hold the figures of an export."""

    architecture: str
    step: int
    num_parameters: int
    num_bytes: int
    difference: float  # largest difference of logits to the run's student, read back
    kept: bool  # the folder had these files already


def export(
    run: Path,
    folder: Path,
    warn: Callable[[str], None],
    *,
    same: Callable[[Path], Mapping[str, str]] | None = None,
    onnx: Onnx | None = None,
    say: Callable[[str], None] = print,
) -> Exported:
    """Write the newest checkpoint's student to `folder`, and compare it when read back.

    The layout is that of `distilbert-base-uncased` (or a BERT's, for objective mlm).

    Args:
        run: the output folder of a run, which may continue meanwhile.
        folder: the target; missing or empty.
        warn: receives newer checkpoints that do not verify or were removed by the run.
        same: keeps a target with the same files, see `write_model`.
        onnx: the ONNX files to add; see `write_onnx`.
        say: receives a line for each of them.

    Raises:
        RunError: there is no checkpoint, the folder is taken, the logits differ, or an ONNX file is
            not good enough.
        OSError: the disk is full or read-only.
    """
    check_target(run, folder, again=same is not None)
    check_run(run)

    def read(loaded: Loaded) -> tuple[Loaded, dict[str, bytes], Tensors, Tensors]:
        assert loaded.saved is not None  # `check_run` has found a checkpoint
        positions = family_of(loaded.model).row_length(loaded.model.config)
        pairs = bool((loaded.saved.state.get("labels") or {}).get("pairs"))
        tokenizer = tokenizer_files.of_checkpoint(
            loaded.folder, positions, types=pairs and has_types(loaded.model)
        )
        tensors = read_tensors(str(loaded.folder), loaded.folder)
        return loaded, tokenizer, loaded.saved.adapters(), tensors

    # Whether it has a head, the run's objective says.
    loaded, tokenizer, adapters, tensors = read_model(str(run), read, needs_head=False, warn=warn)
    model, saved = loaded.model.eval(), loaded.saved
    assert saved is not None
    objective, seed = objective_of(saved.state), saved.state["config"]["train"]["seed"]
    if onnx is not None and saved.step < saved.state["num_steps"]:
        warn(f"{run}: unfinished; the files are of step {saved.step:,}")
    student: Any = task_of(saved.state).finished(model, saved.state, adapters)
    if student is not None:  # a task's model: its encoder has a prefix there, beside the head
        prefix = student.base_model_prefix
        tensors = {f"{prefix}.{name}": tensor for name, tensor in tensors.items()}
        tensors |= saved_head(adapters)
    else:
        student = model if objective.needs.logits else body(model, seed)
    kept = run / MEASURED
    measured = json.loads(kept.read_bytes()) if kept.exists() else {}
    about = about_run(run)
    card = model_card(student, saved.state, measured, about)

    def extra(place: Path) -> None:
        width = student.config.hidden_size
        task_of(saved.state).export(place, width, saved.state, adapters)
        if text := about.card.get("example"):
            shown = answer(place, task_of(saved.state).use(objective).pipeline, text)
            card.text = card.text.replace("## Use\n", f"{shown}\n\n## Use\n", 1)
            card.save(place / "README.md")
        if onnx is not None:
            from pretrain.export.onnx.write import write_onnx  # needs the extra

            write_onnx(place, onnx, say, before=folder)
        new.append((place / "README.md").read_text(encoding="utf-8"))

    new: list[str] = []
    difference, is_kept = write_model(
        student,
        folder,
        tensors=tensors,
        tokenizer=tokenizer,
        card=card,
        extra=extra,
        same=same,
    )
    file = folder / "README.md"
    if is_kept and of_owner(file.read_text(encoding="utf-8")) != of_owner(new[0]):
        replace_text(file, new[0])
        say(f"{file}: written again, because keys of `card` or figures have changed")
    return exported(student, folder, saved.step, difference, kept=is_kept)


def of_owner(card: str) -> list[Any]:
    """Return what keys of `card` and `distil evaluate` have written into a card."""
    data = ModelCard(card).data
    quoted = [line for line in card.splitlines() if line.startswith("> ")]
    tables = re.findall(r"On [^\n]*, with 95 % intervals:\n\n(?:\|[^\n]*\n)*", card)
    return [data.get("license"), data.get("language"), data.get("base_model"), quoted, tables]


def about_run(run: Path) -> About:
    """Return what a run's folder says for its card."""
    values = parse_object((run / "config.json").read_bytes())
    # A line that no run wrote says nothing; `distil replay` refuses it.
    lines = [
        line
        for line in read_metrics(run / "metrics.jsonl")
        if isinstance(line, dict) and {"kind", "step"} <= line.keys()
    ]
    starts = [(-math.inf, 0.0)]  # begun, lasted
    for line in lines:
        if {"time", "elapsed"} <= line.keys():
            begun = line["time"] - line["elapsed"]
            if begun > starts[-1][0] + 2:  # else the same, but for rounding
                starts.append((begun, 0.0))
            starts[-1] = starts[-1][0], line["elapsed"]
    first = (line for line in lines if line["kind"] == "evaluation" and line["step"] == 0)
    return About(
        values.get("card") or {},
        values.get("machine") or {},
        sum(lasted for _, lasted in starts),
        max((line["epoch"] for line in lines if "epoch" in line), default=0.0),
        next(first, {}),
    )


def answer(folder: Path, pipeline: str, text: str) -> str:
    """Return the paragraph of a card that shows what an export answers to a text.

    Raises:
        RunError: the text is longer than the model reads.
    """
    make: Any = transformers.pipeline
    run = make(pipeline, model=str(folder), device="cpu")
    shown = text.replace("[MASK]", run.tokenizer.mask_token) if pipeline == SHOWN[0] else text
    length, most = len(run.tokenizer(shown)["input_ids"]), run.tokenizer.model_max_length
    if length > most:
        raise RunError(f"card.example: has {length:,} tokens, and the model reads {most:,}: cut it")
    found = run(shown) if pipeline == SHOWN[2] else run(shown, top_k=3)
    answers = (
        f"**{escaped(str(each.get('token_str') or each.get('label') or each['word']).strip())}**"
        f"{escaped(' ' + each['entity']) if 'entity' in each else ''} ({each['score']:.0%})"
        for each in found
    )
    return f"> {escaped(text)}\n>\n> The model answers: {', '.join(answers)}"


def export_model(
    name: str,
    folder: Path,
    onnx: Onnx,
    warn: Callable[[str], None],
    say: Callable[[str], None] = print,
    *,
    same: Callable[[Path], Mapping[str, str]] | None = None,
) -> Exported:
    """Write any model that is read here to `folder` with ONNX files; see `export`.

    Args:
        name: a folder, or a hub's name.
        folder: the target; missing or empty.
        onnx: the files.
        warn: receives what is noteworthy.
        say: receives a line for each file.
        same: keeps a target with the same files, see `write_model`.
    """
    check_target(Path(name), folder, again=same is not None)
    if onnx_file(Path(name)) is not None:
        raise RunError(f"{name}: is an ONNX file already; give the folder with the model's weights")

    def read(
        loaded: Loaded,
    ) -> tuple[Loaded, TaskHead | None, dict[str, bytes], Tensors, dict[str, bytes]]:
        head = own_head(name, loaded)
        for file in ("tokenizer.json", "tokenizer_config.json"):
            if not (loaded.folder / file).is_file():
                raise RunError(f"{name}: no {file}; save its tokenizer there with save_pretrained")
        # Before anything is written: modules that are not supported.
        read_head(name, loaded.folder, loaded.model.config.hidden_size)
        tokenizer = own_tokenizer(loaded, head)
        tensors = read_tensors(name, loaded.folder, pickled=True)
        return loaded, head, tokenizer, tensors, sentence_modules(loaded.folder)

    of_task = output_of(model_config(name, name)) is not None
    loaded, head, tokenizer, tensors, modules = read_model(
        name, read, needs_head=False, of_task=of_task, warn=warn
    )
    # A sentence encoder may have kept a head that its vectors do not need.
    has_logits = loaded.has_head and "modules.json" not in modules
    model: Any = loaded.model.eval() if has_logits else body(loaded.model, 0)
    if head is not None:
        model = with_head(loaded.model, head)
    elif (pooler := getattr(model, "pooler", None)) is not None:
        found = {
            k.rpartition("pooler.")[2]: v.float() for k, v in tensors.items() if "pooler." in k
        }
        if found:
            pooler.load_state_dict(found)

    def extra(place: Path) -> None:
        from pretrain.export.onnx.write import write_onnx  # needs the extra

        write_modules(place, modules)
        write_onnx(place, onnx, say, before=folder)

    title = Path(name).name
    card = ModelCard(f"# {escaped(title)} in ONNX\n\nThe weights are those of `{title}`.\n")
    difference, is_kept = write_model(
        model, folder, tensors={}, tokenizer=tokenizer, card=card, extra=extra, same=same
    )
    return exported(model, folder, 0, difference, kept=is_kept)


def sentence_modules(folder: Path) -> dict[str, bytes]:
    """Return what sentence-transformers reads: settings, and modules in folders of their own."""
    files = [path for path in folder.glob("*.json") if re.match("modules|.*sentence_", path.name)]
    files += folder.glob("[1-9]_*/*.json")
    files += folder.glob("[1-9]_*/*.safetensors")
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def write_modules(folder: Path, modules: Mapping[str, bytes]) -> None:
    """Write what `sentence_modules` has read."""
    for path, data in modules.items():
        (folder / path).parent.mkdir(exist_ok=True)
        (folder / path).write_bytes(data)


def own_tokenizer(loaded: Loaded, head: TaskHead | None) -> dict[str, bytes]:
    """Return the tokenizer files of a loaded model, with types where its task's head reads them."""
    family, config = family_of(loaded.model), loaded.model.config
    types = None if head is not None and has_types(loaded.model) else False
    return tokenizer_files.of_checkpoint(loaded.folder, family.row_length(config), types=types)


def exported(
    model: PreTrainedModel, folder: Path, step: int, difference: float, *, kept: bool
) -> Exported:
    """Return the figures of a model that was written."""
    return Exported(
        architecture=type(model).__name__,
        step=step,
        num_parameters=sum(p.numel() for p in model.parameters()),
        num_bytes=(folder / "model.safetensors").stat().st_size,
        difference=difference,
        kept=kept,
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
    except Exception as error:  # HTTP, hub and transfer libraries raise unrelated exceptions
        reason = first_line(error).replace(token, "***")
        raise RunError(
            f"{folder} is written, but not uploaded to {repository}: {reason}; the same command "
            f"tries again (once the run has gone on, `hf upload {repository} {folder}` does)"
        ) from None
    return f"uploaded to {repository} ({commit.oid[:12]})"
