"""Write the model card: recipe, data with licences, figures next to the teacher's, how to load."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from huggingface_hub import ModelCard, ModelCardData
from transformers import PreTrainedModel

from data_prep.messages import one_line
from pretrain.config import OF_INIT
from pretrain.model.families import family_of
from pretrain.monitor.figures import label
from pretrain.monitor.tables import escaped, markdown
from pretrain.objectives.known import objective_of, task_of
from pretrain.objectives.objective import Objective
from pretrain.tasks.mlm.head_figures import weak_teacher

_FIGURES = {
    "loss": "masked cross-entropy (nats)",
    "accuracy": "masked-token accuracy",
    "constant_accuracy": "accuracy of always answering these rows' most frequent masked token",
    "unigram_loss": "loss of the training tokens' frequencies (nats)",
    "teacher_accuracy": "teacher's accuracy",
    "teacher_loss": "teacher's masked cross-entropy (nats)",
    "agreement": "agreement with the teacher",
    "kl": "KL(teacher || student), nats",
}


def model_card(
    student: PreTrainedModel, state: Mapping[str, Any], measured: Mapping[str, Any] | None = None
) -> ModelCard:
    """Build the card from a checkpoint's state; it contains measured figures only.

    Args:
        student: the model.
        state: of the checkpoint.
        measured: what `distil evaluate` kept in the run's folder; of another step it is left out.
    """
    config, teacher = state["config"], state["teacher"]
    objective = objective_of(state)
    distilled = (teacher is not None or bool(state.get("vectors"))) and objective.compares
    how = _provenance(state, objective, distilled)
    size, notes = sum(p.numel() for p in student.parameters()), state.get("notes")

    figures = _figures(state, objective.needs_logits, measured)

    # The keys of the config that shape the run, without paths of the machine it ran on.
    recipe: list[tuple[str, object]] = []
    cut = config["teacher"] is not None and config["model"] is None  # from a teacher
    unused = set()  # keys that another one overrides: their values trained nothing
    if config["train"]["max_steps"] is not None:
        unused.add("train.epochs")
    if config["optimizer"].get("schedule") != "wsd":
        unused.add("optimizer.decay_ratio")
    if config["model"] is not None and config["model"].get("init") is not None:
        unused |= {f"model.{key}" for key in OF_INIT}
    for section in ("objective", "model", "student", "masking", "optimizer", "train"):
        for key, value in (config[section] or {}).items():
            # A published card must not contain paths of this machine; a note says what it was.
            if key == "init" and isinstance(value, str) and value not in ("teacher", "random"):
                value = "an existing model"
            used = value is not None and f"{section}.{key}" not in unused
            if used and (section != "student" or cut):
                recipe.append((f"{section}.{key}", value))
    for first, last, step in state["skip_rows"]:
        recipe.append(("left out", f"training rows {first} to {last - 1}, from step {step + 1} on"))

    use = task_of(state).use(objective)
    headless = f" {use.note}" if use.note else ""
    if getattr(student, "pooler", None) is not None:
        headless += " Its pooler is untrained, with random weights."
    data = ModelCardData(
        library_name=use.library,
        pipeline_tag=use.pipeline,
        tags=[use.pipeline, "distillation"] if distilled else [use.pipeline],
        base_model=one_line(teacher["name"]) if distilled and teacher and teacher["name"] else None,
    )
    parts = [
        f"---\n{data.to_yaml()}\n---",
        f"# {student.config.num_hidden_layers}-layer {type(student).__name__}",
        f"{how}: {size:,} parameters, {state['step']:,} of {state['num_steps']:,} steps, "
        f"{state['tokens']:,} tokens seen.{headless}",
        # Checkpoints of older versions have no notes.
        *(["\n".join(f"- {escaped(note)}" for note in notes)] if notes else []),
        "## Use",
        f"```python\n{family_of(student).imports}{use.code}\n```",
        "## Validation figures",
        *figures,
        "## Data",
        markdown(
            ("source", "kind", "documents", "licence"),
            [(s["name"], s["kind"], s["documents_kept"], s["licence"]) for s in state["sources"]],
        ),
        f"Digest of the packed rows: `{state['shards']}`.",
        "## Recipe",
        markdown(("key", "value"), recipe),
    ]
    return ModelCard("\n\n".join(parts) + "\n")


def _figures(
    state: Mapping[str, Any], has_head: bool, measured: Mapping[str, Any] | None
) -> list[str]:
    """Return the paragraphs of the validation figures."""
    evaluation = state["evaluation"]
    figures = ["Not measured: the corpus had no validation split."]
    if evaluation and not has_head:
        rows = [(label(k), f"{value:.4f}") for k, value in evaluation.items() if k != "tokens"]
        figures = [
            markdown(("term", "value"), rows),
            f"Measured at step {state['evaluation_step']:,}: means over the validation rows"
            + (f", {evaluation['tokens']:,.0f} tokens" if "tokens" in evaluation else "")
            + ", without masks.",
        ]
    elif evaluation:
        rows = [(text, f"{evaluation[k]:.4f}") for k, text in _FIGURES.items() if k in evaluation]
        figures = [
            markdown(("figure", "value"), rows),
            f"Measured at step {state['evaluation_step']:,}: means over "
            f"{evaluation['masked_tokens']:,.0f} masked tokens "
            "of validation rows, every selected token replaced by [MASK].",
        ]
        figures += [f"Warning: {text}"] if (text := weak_teacher(evaluation)) else []

    known = measured if measured and measured["step"] == state["step"] else {"tables": {}}
    for what, table in known["tables"].items():
        columns = dict.fromkeys(name for _, row in table for name in row)
        cells = [[name, *(row.get(c, "") for c in columns)] for name, row in table]
        figures += [f"On {escaped(what)}, with 95 % intervals:", markdown(["", *columns], cells)]
    return figures


def _provenance(state: Mapping[str, Any], objective: Objective, distilled: bool) -> str:
    """Return a sentence that says how the model was trained."""
    teacher, vectors = state["teacher"], state.get("vectors") or {}
    how = task_of(state).trained(objective)
    if distilled and teacher is None:
        name = escaped(vectors["name"] or "a model")
        how = (
            f"Distilled from a file of the vectors of {name} (digest `{vectors['digest'][:16]}`) "
            f"with {objective.sentence}"
        )
    elif distilled:
        revision = f" at revision `{escaped(teacher['revision'])}`" if teacher["revision"] else ""
        name = escaped(teacher["name"] or "a local model")
        paper = f" ({objective.published})" if objective.published else ""
        how = (
            f"Distilled from {name}{revision} (weights sha256 `{teacher['sha256'][:16]}`) with "
            f"{objective.sentence}{paper}"
        )
    elif teacher is not None:
        how += "; no term compares it with the teacher"
    return how
