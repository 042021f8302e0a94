"""The model card: recipe, data with licences, figures beside the teacher's, how to load."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from huggingface_hub import ModelCard, ModelCardData
from pydantic import TypeAdapter

from data_prep.messages import one_line
from pretrain.config import Objective
from pretrain.model.encoder import MaskedLM

_OBJECTIVE: TypeAdapter[Objective] = TypeAdapter(Objective)
_FIGURES = {
    "loss": "masked-token loss (nats)",
    "accuracy": "masked-token accuracy",
    "constant_accuracy": "accuracy of always answering these rows' most frequent masked token",
    "unigram_loss": "loss of the training tokens' frequencies (nats)",
    "teacher_accuracy": "teacher's accuracy",
    "agreement": "agreement with the teacher",
    "kl": "KL(teacher || student), nats",
}


def model_card(student: MaskedLM, state: Mapping[str, Any]) -> ModelCard:
    """Return a card from a checkpoint's state; says what was measured and nothing else."""
    config, teacher = state["config"], state["teacher"]
    distilled = teacher is not None and _from_teacher(config)
    data = ModelCardData(
        library_name="transformers",
        pipeline_tag="fill-mask",
        tags=["fill-mask", "distillation"] if distilled else ["fill-mask"],
        base_model=one_line(teacher["name"]) if distilled and teacher["name"] else None,
    )
    title = f"{student.config.num_hidden_layers}-layer {type(student).__name__}"
    parts = [
        f"---\n{data.to_yaml()}\n---",
        f"# {title}",
        _summary(student, state),
        "## Use",
        "```python\nfrom transformers import pipeline\n\n"
        'fill = pipeline("fill-mask", model="PATH_OR_NAME")\n```',
        "## Held-out figures",
        *_figures(state["evaluation"], state["evaluation_step"]),
        "## Data",
        _table(
            ("source", "kind", "documents", "licence"),
            [(s["name"], s["kind"], s["documents_kept"], s["licence"]) for s in state["sources"]],
        ),
        f"Digest of the packed rows: `{state['shards']}`.",
        "## Recipe",
        _table(("key", "value"), [*_recipe(config), *_skipped(state["skip_rows"])]),
    ]
    return ModelCard("\n\n".join(parts) + "\n")


def _summary(student: MaskedLM, state: Mapping[str, Any]) -> str:
    size = sum(p.numel() for p in student.parameters())
    objective = _OBJECTIVE.validate_python(state["config"]["objective"])
    terms = " + ".join(f"{term.weight:g} x {term.description}" for term in objective.terms())
    how = f"Trained by masked language modelling ({terms})"
    teacher = state["teacher"]
    if teacher is not None and not _from_teacher(state["config"]):
        how += "; no term compares it with the teacher"
    elif teacher is not None:
        revision = f" at revision `{_escape(teacher['revision'])}`" if teacher["revision"] else ""
        name = _escape(teacher["name"] or "a local BERT")
        paper = f" ({objective.published})" if objective.published else ""
        how = (
            f"Distilled from {name}{revision} (weights sha256 `{teacher['sha256'][:16]}`) with "
            f"{terms}{paper}"
        )
    return (
        f"{how}: {size:,} parameters, {state['step']:,} of {state['num_steps']:,} steps, "
        f"{state['tokens']:,} tokens seen."
    )


def _from_teacher(config: Mapping[str, Any]) -> bool:
    """Tell whether a term of the objective compares the student with the teacher."""
    terms = _OBJECTIVE.validate_python(config["objective"]).terms()
    return any(term.name != "mlm" for term in terms)


def _figures(evaluation: Mapping[str, float], step: int) -> Iterable[str]:
    if not evaluation:
        return ["Not measured: the corpus had no validation split."]
    rows = [
        (text, f"{evaluation[name]:.4f}") for name, text in _FIGURES.items() if name in evaluation
    ]
    return [
        _table(("figure", "value"), rows),
        f"Measured at step {step:,}: means over {evaluation['masked_tokens']:,.0f} masked tokens "
        "of held-out rows, every selected token replaced by [MASK].",
    ]


def _recipe(config: Mapping[str, Any]) -> list[tuple[str, object]]:
    """Return the keys of the config that shape the run; no paths of the machine it ran on."""
    rows: list[tuple[str, object]] = []
    for section in ("objective", "model", "student", "masking", "optimizer", "train"):
        for key, value in (config[section] or {}).items():
            if section == "student" and key == "init" and "/" in str(value):
                value = "a local checkpoint"
            if (section, key) == ("train", "epochs") and config["train"]["max_steps"] is not None:
                continue  # it says nothing then
            if value is not None and (section != "student" or config["teacher"] is not None):
                rows.append((f"{section}.{key}", value))
    return rows


def _skipped(skips: Sequence[Sequence[int]]) -> Iterator[tuple[str, object]]:
    """Yield the training rows that were left out by --skip-rows."""
    for first, last, step in skips:
        yield "left out", f"training rows {first} to {last - 1}, from step {step + 1} on"


def _table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(_escape(cell) for cell in line) + " |" for line in lines)


def _escape(value: object) -> str:
    """Text that stays text in Markdown: a source's name is a user's string."""
    text = one_line(str(value))
    for character in "\\`|<>[]*_":
        text = text.replace(character, f"\\{character}")
    return text
