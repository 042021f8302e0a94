"""Write the model card: recipe, data with licences, figures next to the teacher's, how to load."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from huggingface_hub import ModelCard, ModelCardData
from transformers import PreTrainedModel

from data_prep.messages import duration, one_line
from pretrain.model.families import family_of
from pretrain.model.model_config import OF_INIT
from pretrain.monitor.figures import escaped, label, markdown, with_columns
from pretrain.objectives.known import objective_of, task_of
from pretrain.objectives.objective import Objective

_FIGURES = {
    "loss": "masked cross-entropy (nats)",
    "accuracy": "masked-token accuracy",
    "agreement": "agreement with the teacher",
    "kl": "KL(teacher || student), nats",
}
_TEST_RUN = 10_000_000  # tokens: a body that has seen fewer was made to try something
_LIMITS = (
    "What is wrong or one-sided in the data below it has learnt, too. Measure it on your own data "
    "before you rely on it."
)


class About(NamedTuple):
    """Hold what a run's folder says besides its checkpoint.

    Args:
        card: the keys of `card:`.
        machine: what trained it, from the last start on.
        seconds: of training, all starts together; 0 if its metrics do not say.
        epochs: of training; 0 if its metrics do not say.
        before: the validation figures of step 0.
    """

    card: Mapping[str, Any] = {}
    machine: Mapping[str, Any] = {}
    seconds: float = 0.0
    epochs: float = 0.0
    before: Mapping[str, float] = {}


def model_card(
    student: PreTrainedModel,
    state: Mapping[str, Any],
    measured: Mapping[str, Any] | None = None,
    about: About | None = None,
) -> ModelCard:
    """Build the card from a checkpoint's state; it contains measured figures only.

    Args:
        student: the model.
        state: of the checkpoint.
        measured: what `distil evaluate` kept in the run's folder; of another step it is left out.
        about: what else the run's folder says.
    """
    config, teacher, about = state["config"], state["teacher"], about or About()
    objective = objective_of(state)
    distilled = (teacher is not None or bool(state.get("vectors"))) and objective.needs.compares
    how = _provenance(state, objective, distilled, about.card.get("base_model"))
    size, notes = sum(p.numel() for p in student.parameters()), state.get("notes")

    figures = _figures(state, objective.needs.logits, measured, about.before)

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
    keys = {k: one_line(v) if isinstance(v, str) else v for k, v in about.card.items()}
    evaluation = state["evaluation"] or {}
    of_hub = one_line(teacher["name"]) if distilled and teacher and teacher["name"] else None
    data = ModelCardData(
        license=keys.get("licence"),
        language=[one_line(code) for code in keys.get("language") or ()] or None,
        library_name=use.library,
        pipeline_tag=use.pipeline,
        tags=[use.pipeline, "distillation"] if distilled else [use.pipeline],
        base_model=keys.get("base_model") or of_hub,
        metrics=[name for name in ("accuracy", "f1", "mcc", "pearson") if name in evaluation],
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
        _shape(student, state),
        "## Validation figures",
        *figures,
        "## Limits",
        " ".join(_limits(state)),
        "## Data",
        markdown(
            ("source", "kind", "documents", "licence"),
            [(s["name"], s["kind"], s["documents_kept"], s["licence"]) for s in state["sources"]],
        ),
        *(
            f"{escaped(source['name'])}: {num:,} {name}."
            for source in state["sources"]
            if task_of(state).has_head
            for name, num in source["noted"].items()
        ),
        f"Digest of the packed rows: `{state['shards']}`.",
        "## Training",
        _training(state, about),
        "## Recipe",
        markdown(("key", "value"), recipe),
    ]
    return ModelCard("\n\n".join(parts) + "\n")


def _shape(student: PreTrainedModel, state: Mapping[str, Any]) -> str:
    config: Any = student.config
    positions = family_of(student).row_length(config)
    return (
        f"A token's vector has {config.hidden_size} numbers. A text has at most {positions:,} "
        f"tokens; in training rows had {state['row_length']:,}."
    )


def _limits(state: Mapping[str, Any]) -> Iterator[str]:
    if state["tokens"] < _TEST_RUN and not task_of(state).has_head:
        yield (
            f"**A test run**: it has seen {state['tokens']:,} tokens, and encoders for use see "
            f"more than {_TEST_RUN:,}."
        )
    yield _LIMITS


def _training(state: Mapping[str, Any], about: About) -> str:
    """Return a table of where and how long the run was trained."""
    machine, train = about.machine, state["config"]["train"]
    device = machine.get("gpu") or machine.get("processor") or "not recorded"
    rows: list[tuple[str, object]] = [
        ("hardware", f"{machine.get('processes', state['num_processes'])} x {device}"),
        ("duration", duration(about.seconds) if about.seconds else "not recorded"),
        ("epochs", f"{about.epochs:.3g}" if about.epochs else "not recorded"),
        ("rows", f"{state['step'] * train['global_batch_size']:,}"),
        ("commit of distil-pretraining", machine.get("commit") or "not recorded"),
        *((name, version) for name, version in (state.get("versions") or {}).items()),
    ]
    return markdown(("", ""), rows)


def _figures(
    state: Mapping[str, Any],
    has_head: bool,
    measured: Mapping[str, Any] | None,
    before: Mapping[str, float],
) -> list[str]:
    """Return the paragraphs of the validation figures."""
    evaluation = state["evaluation"]
    figures = ["Not measured: the corpus had no validation split."]

    def table(names: Mapping[str, str]) -> str:
        # Of an interrupted run before the step of its weights.
        step = state.get("evaluation_step", state["step"])
        ours = "trained" if step == state["step"] else f"at step {step:,}"
        columns = {ours: evaluation, "before training": before if step else {}}
        columns["teacher"] = {
            name.removeprefix("teacher_"): value
            for name, value in evaluation.items()
            if name.startswith("teacher_")
        }
        shown = {name: of for name, of in columns.items() if any(k in of for k in names)}
        cells = [
            [text, *(f"{of[k]:.4f}" if k in of else "" for of in shown.values())]
            for k, text in names.items()
            if k in evaluation
        ]
        return markdown(["", *shown], cells)

    if evaluation and not has_head:
        left_out = ("tokens", *(k for k in evaluation if k.startswith("teacher_")))
        figures = [
            table({k: label(k) for k in evaluation if k not in left_out}),
            f"Measured at step {state['evaluation_step']:,}: means over the validation rows"
            + (f", {evaluation['tokens']:,.0f} tokens" if "tokens" in evaluation else "")
            + ", without masks.",
        ]
    elif evaluation:
        figures = [
            table(_FIGURES),
            f"Measured at step {state['evaluation_step']:,}: means over "
            f"{evaluation['masked_tokens']:,.0f} masked tokens of validation rows, every selected "
            "token replaced by [MASK]. Always answering the most frequent one is right in "
            f"{evaluation['constant_accuracy']:.1%} of the cases; the frequencies of the training "
            f"tokens have a loss of {evaluation['unigram_loss']:.4f}.",
        ]
    if evaluation and state["evaluation_step"] < state["step"]:
        figures.append(
            f"The weights are of step {state['step']:,}, which was not measured; `distil evaluate` "
            "does so, and a later export shows it."
        )

    known = measured if measured and measured["step"] == state["step"] else {"tables": {}}
    for what, found in known["tables"].items():
        figures += [f"On {escaped(what)}, with 95 % intervals:", markdown(*with_columns(found))]
    return figures


def _provenance(
    state: Mapping[str, Any], objective: Objective, distilled: bool, known: str | None
) -> str:
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
        local = f"a local model, made from {known}" if known else "a local model"
        name = escaped(teacher["name"] or local)
        paper = f" ({objective.published})" if objective.published else ""
        how = (
            f"Distilled from {name}{revision} (weights sha256 `{teacher['sha256'][:16]}`) with "
            f"{objective.sentence}{paper}"
        )
    elif teacher is not None:
        how += "; no term compares it with the teacher"
    return how
