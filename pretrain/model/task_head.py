"""Hold the head of a task: what transformers' class for it has behind the encoder.

`TaskHead` is that class with its encoder taken out. It computes its own forward pass on our
encoder's output, so a head is what a user's transformers computes, and a model is written by
putting the encoder back.

Shapes: B rows, L row length, D width, C classes.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PreTrainedModel,
)
from transformers.modeling_outputs import BaseModelOutputWithPooling

from pretrain import RunError
from pretrain.contracts.terms import ENDS, LOGITS
from pretrain.model.distillation import HEAD
from pretrain.model.families import MaskedLM

Output = Literal["classes", "score", "tags", "span"]


class HeadClass(NamedTuple):
    """Hold transformers' class of a head."""

    auto: Any
    outputs: tuple[str, ...] = (LOGITS,)  # of the model, and of its ONNX graph
    problem: str | None = None
    names: tuple[str, ...] = ()  # of its logits, where no data name them

    @property
    def end(self) -> str:
        """Return how the names of its models' classes end."""
        name: str = self.auto.__name__
        return name.removeprefix("AutoModel")


_SEQUENCE = AutoModelForSequenceClassification
CLASSES: dict[Output, HeadClass] = {
    "classes": HeadClass(_SEQUENCE, problem="single_label_classification"),
    "score": HeadClass(_SEQUENCE, problem="regression", names=("LABEL_0",)),
    "tags": HeadClass(AutoModelForTokenClassification),
    "span": HeadClass(AutoModelForQuestionAnswering, ENDS, names=("start", "end")),
}
# The dropouts of heads, by their keys of config.json.
_DROPOUTS = ("classifier_dropout", "seq_classif_dropout", "qa_dropout")


class TaskHead(nn.Module):
    """Compute the logits of a task: [E, C], of tags [E, P, C], of answers [E, P, 2].

    Args:
        config: of the encoder; the head's dropout is that of its hidden states.
        output: what the head predicts.
        labels: names of the classes; empty for a score and for answers.
    """

    def __init__(self, config: Any, output: Output, labels: Sequence[str] = ()) -> None:
        super().__init__()
        self.output, self.labels = output, tuple(labels)
        with torch.device("meta"):  # the encoder's weights are not needed
            self.model = CLASSES[output].auto.from_config(task_config(config, output, labels))
        prefix = self.model.base_model_prefix
        encoder = getattr(self.model, prefix)
        setattr(self.model, prefix, _Given(getattr(encoder, "pooler", None)))
        self.to_empty(device="cpu")

    def forward(self, hidden_EPD: Tensor, there_EP: Tensor) -> Tensor:
        """Return logits of the encoder's output, one example a row."""
        # The encoder's place returns what it is given as embeddings.
        # An example that is left out has one place here, of zeros: a mean over none would be NaN.
        mask_EP = there_EP.long()
        mask_EP[:, 0] = 1
        found = self.model(inputs_embeds=hidden_EPD, attention_mask=mask_EP)
        logits: list[Tensor] = [found[name] for name in CLASSES[self.output].outputs]
        return logits[0] if len(logits) == 1 else torch.stack(logits, dim=-1)

    def begin_at(self, score: float) -> None:
        """Let a new head of one score begin at a value: a mean costs no steps to find."""
        *_, last = (part for part in self.modules() if isinstance(part, nn.Linear))
        nn.init.constant_(last.bias, score)

    def tensors(self) -> dict[str, Tensor]:
        """Return the head's weights by their names in a file of transformers."""
        return {name.removeprefix("model."): t for name, t in self.state_dict().items()}

    def load(self, tensors: Mapping[str, Tensor]) -> list[str]:
        """Take the weights that fit; return the names of the others."""
        own, missing = self.tensors(), []
        for name, tensor in own.items():
            given = tensors.get(name)
            if given is None or given.shape != tensor.shape:
                missing.append(name)
            else:
                tensor.copy_(given)
        return missing


class _Given(nn.Module):
    """Stand where an encoder was, and return its output, which came as embeddings."""

    def __init__(self, pooler: nn.Module | None) -> None:
        super().__init__()
        self.pooler = pooler

    def forward(self, *_: Any, inputs_embeds: Tensor, **__: Any) -> BaseModelOutputWithPooling:
        pooled: Any = self.pooler(inputs_embeds) if self.pooler is not None else None
        return BaseModelOutputWithPooling(last_hidden_state=inputs_embeds, pooler_output=pooled)


def task_config(config: Any, output: Output, labels: Sequence[str]) -> Any:
    """Return the config of a model with a head."""
    found = copy.deepcopy(config)
    names = labels or CLASSES[output].names
    found.id2label = dict(enumerate(names))
    found.label2id = {name: i for i, name in enumerate(names)}
    found.problem_type = CLASSES[output].problem
    rate = next((getattr(config, key) for key in _HIDDEN if hasattr(config, key)), 0.0)
    for key in _DROPOUTS:
        if hasattr(found, key):
            setattr(found, key, rate)
    return found


# Of BERT and RoBERTa, of DistilBERT, of ModernBERT.
_HIDDEN = ("hidden_dropout_prob", "dropout", "mlp_dropout")


def with_head(encoder: MaskedLM, head: TaskHead) -> PreTrainedModel:
    """Return a model of transformers' class for the task, with an encoder and a head."""
    config = task_config(encoder.config, head.output, head.labels)
    with torch.device("meta"):
        model: Any = CLASSES[head.output].auto.from_config(config)
    base = encoder.base_model
    prefix = model.base_model_prefix
    state = {f"{prefix}.{name}": tensor for name, tensor in base.state_dict().items()}
    state |= head.tensors()
    model.to_empty(device="cpu")
    # Buffers that are computed and not stored, such as positions, come from the encoder.
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected, unexpected
    assert not missing, missing
    for name, buffer in base.named_buffers():
        parent, _, leaf = name.rpartition(".")
        getattr(model, prefix).get_submodule(parent).register_buffer(
            leaf, buffer.detach().clone(), persistent=name in base.state_dict()
        )
    found: PreTrainedModel = model.eval()
    return found


def labels_of(raw: Mapping[str, Any], output: Output) -> list[str]:
    """Return the classes that a config.json names, in the order of their numbers."""
    if CLASSES[output].names:
        return []
    names = raw.get("id2label")
    if isinstance(names, dict) and names:
        return [str(names[key]) for key in sorted(names, key=int)]
    return ["LABEL_0", "LABEL_1"]  # transformers leaves out the two of its default


def output_of(raw: Mapping[str, Any]) -> Output | None:
    """Return what the head in a config.json predicts; None of another one."""
    name = str((raw.get("architectures") or [""])[0])
    for output, kind in CLASSES.items():
        if name.endswith(kind.end):
            one = output == "classes" and len(labels_of(raw, output)) == 1
            return "score" if one else output
    return None


def check_head(who: str, raw: Mapping[str, Any], output: Output) -> None:
    """Refuse a config.json that names another class; RunError says which one is needed.

    One weight has the same name and shape in a classifier and in a tagger.
    """
    names, wanted = raw.get("architectures") or [], CLASSES[output].end
    if isinstance(names, list) and names and not str(names[0]).endswith(wanted):
        head = wanted.removeprefix("For")
        raise RunError(
            f"{who}: it is a {names[0]}, which has no head for {head}; fine-tune it on the task "
            "first"
        )
    num = len(labels_of(raw, "classes"))
    if output == "score" and raw.get("architectures") and num != 1:
        raise RunError(f"{who}: it gives {num} classes, and the task is a score")


def read_task_head(
    who: str,
    raw: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    encoder: MaskedLM,
    output: Output,
) -> TaskHead:
    """Return the trained head of a model's folder.

    Args:
        who: the beginning of an error's message.
        raw: its config.json, which `check_head` has passed.
        tensors: of its weights.
        encoder: of the folder.
        output: what the head must predict.

    Raises:
        RunError: it has no such head.
    """
    labels = labels_of(raw, output)
    head = TaskHead(encoder.config, output, labels)
    with torch.no_grad():
        missing = head.load(tensors)
    if missing:
        wanted = CLASSES[output].end.removeprefix("For")
        raise RunError(
            f"{who}: it has no head for {wanted} of {len(labels) or 1} output(s) ({missing[0]} is "
            "not in its weights); fine-tune it on the task first"
        )
    return head.eval()


def saved_head(modules: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the head's weights of a checkpoint, named as in a file of transformers."""
    begin = f"{HEAD}.model."
    return {n.removeprefix(begin): t for n, t in modules.items() if n.startswith(begin)}


def head_tensors(encoder: MaskedLM, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights of a folder that are not the encoder's, named as in a model with a head.

    A folder of an encoder names its pooler without the encoder's prefix.
    """
    prefix = f"{encoder.base_model_prefix}."
    own = {f"{prefix}{name}" for name in encoder.base_model.state_dict()}
    found = {}
    for name, tensor in tensors.items():
        full = name if name.startswith(prefix) or not name.startswith("pooler.") else prefix + name
        if full not in own:
            found[full] = tensor
    return found
