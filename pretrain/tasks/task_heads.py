"""Define what the head of a task predicts: a class for each kind of output, and nothing elsewhere.

    classes    one of C classes               logits [E, C]
    score      a number                       [E, 1]
    tags       a class of each word           [E, P, C]
    span       where an answer is             [E, P, 2], of its first and its last token

-100 and NaN are no label. Padding, and an example that is left out, count nothing.

Shapes: E examples of up to P tokens, R rows of length L, C classes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import cross_entropy, kl_div

from data_prep.shards.manifest import EXAMPLES
from data_prep.tokens import of_shards
from pretrain.contracts.batch import IGNORE
from pretrain.contracts.terms import wide
from pretrain.model.task_head import Output
from pretrain.tasks.task_metrics import best_span, counts, exact_match, f1, of_classes, of_scores

if TYPE_CHECKING:
    from pretrain.tasks.labelled.examples import LabelledRows


Columns = Mapping[str, Any]  # of chosen rows, numpy arrays by name
Tensors = Mapping[str, Tensor]  # labels of a batch


class Measured(NamedTuple):
    """Hold what a model predicted: how to make figures of chosen examples."""

    size: int  # examples
    statistics: Callable[[NDArray[np.int64]], dict[str, float]]

    def figures(self, metric: str, some: NDArray[np.int64] | None = None) -> dict[str, float]:
        """Return the figures of chosen examples, by default of all, the score of the task first.

        A metric is the name of a figure, or of two, whose mean it is: "f1 and accuracy".
        """
        values = self.statistics(np.arange(self.size) if some is None else some)
        parts = [values[name] for name in metric.split(" and ")]
        return {"score": sum(parts) / len(parts), **values}

    def score(self, metric: str, some: NDArray[np.int64] | None = None) -> float:
        """Return the score of the task on chosen examples, by default on all."""
        return self.figures(metric, some)["score"]


class Head(ABC):
    """Say what is predicted, by which columns of the shards, and how it is compared."""

    kind: ClassVar[str]  # of examples, as `distil prepare` names them
    output: ClassVar[Output]  # of a model, as its checkpoints name it
    metric: ClassVar[str]  # the usual score
    columns: ClassVar[tuple[str, ...]]  # label columns; the first tells which rows have a label
    nothing: ClassVar[float] = IGNORE  # stands where a row has no label
    by_token: ClassVar[tuple[str, ...]] = ()  # labels with an entry for each token
    has_classes: ClassVar[bool] = True  # is the guess the class with the highest logit?
    whole_texts: ClassVar[bool] = False  # is a figure made of all rows of a text together?

    def width(self, names: Sequence[str]) -> int:
        """Return how many logits an example, or a token, has, given the names of the classes."""
        return len(names)

    def labelled(self, columns: Columns) -> Tensor:
        """Return which rows have a label [R], or which of their tokens [R, L]."""
        return torch.as_tensor(columns[self.columns[0]]) != IGNORE

    @abstractmethod
    def loss(self, logits: Tensor, labels: Tensors, there_EP: Tensor) -> Tensor:
        """Return the sum of the losses of the labels.

        Args:
            logits: of the head, in fp32.
            labels: the columns, and tensors of other names.
            there_EP: False behind an example.
        """

    def soft(self, s: Tensor, t: Tensor, there_EP: Tensor, temperature: float | None) -> Tensor:
        """Return the sum over examples of T^2 KL(softmax(t / T) || softmax(s / T)).

        Without a temperature it is the squared difference. Of tokens it is a mean over a text's.
        """
        if temperature is None:
            return self.total((s - t).square().sum(-1), there_EP)
        return self.total(divergence(s, t, temperature), there_EP) * temperature**2

    def total(self, values: Tensor, there_EP: Tensor) -> Tensor:
        """Return the sum over examples of values, one for each example, or for each token."""
        return (values * there_EP[:, 0]).sum()

    def decided(self, logits: NDArray[Any], columns: Columns) -> NDArray[Any]:
        """Return what logits [R, ..] choose: guesses [N], or scores [R]."""
        return logits.argmax(-1)

    @abstractmethod
    def measured(self, rows: LabelledRows, columns: Columns, logits: NDArray[Any]) -> Measured:
        """Return what makes figures of logits, for the same rows as the columns."""

    # An output is a distribution, or a score: an example, a word or an end of an answer.

    def slots(self, there_EP: Tensor) -> Tensor:
        """Return which of an example's slots are an output."""
        return torch.ones_like(there_EP[:, :1])

    def outputs(self, logits: Tensor, there_EP: Tensor) -> Tensor:
        """Return the logits of each output [N, C]."""
        return logits

    def targets(self, labels: Tensors, there_EP: Tensor) -> Tensor:
        """Return the label of each output [N]."""
        return labels[self.columns[0]]


class Classes(Head):
    """Predict one of several classes."""

    kind, output, metric = "classification", "classes", "accuracy"
    columns = ("label",)

    def loss(self, logits: Tensor, labels: Tensors, there_EP: Tensor) -> Tensor:
        """Return CE(z, y)."""
        return cross_entropy(logits, labels["label"].long(), reduction="sum")

    def measured(self, rows: LabelledRows, columns: Columns, logits: NDArray[Any]) -> Measured:
        """Return accuracy, F1 and Matthews' correlation."""
        there = columns["label"] != IGNORE
        given, chosen = columns["label"][there].astype(np.int64), _chosen(logits[there])
        num = len(rows.names)
        return Measured(len(given), lambda some: of_classes(given[some], chosen[some], num))


class Score(Head):
    """Predict a number; of two texts a similarity."""

    kind, output, metric = "regression", "score", "pearson and spearman"
    columns, nothing = ("score",), np.nan
    has_classes = False

    def width(self, names: Sequence[str]) -> int:
        """Return 1."""
        return 1

    def labelled(self, columns: Columns) -> Tensor:
        """Return which rows have a score [R]."""
        return ~torch.as_tensor(columns["score"]).isnan()

    def loss(self, logits: Tensor, labels: Tensors, there_EP: Tensor) -> Tensor:
        """Return (z - y)^2."""
        score_E = labels["score"].to(logits.dtype)
        known = ~score_E.isnan()
        return ((logits.squeeze(-1) - score_E.nan_to_num()).square() * known).sum()

    def soft(self, s: Tensor, t: Tensor, there_EP: Tensor, temperature: float | None) -> Tensor:
        """Return (s - t)^2: a score has no temperature."""
        return super().soft(s, t, there_EP, None)

    def decided(self, logits: NDArray[Any], columns: Columns) -> NDArray[Any]:
        """Return the scores."""
        return logits[:, 0].astype(np.float64)

    def measured(self, rows: LabelledRows, columns: Columns, logits: NDArray[Any]) -> Measured:
        """Return Pearson's and Spearman's correlation."""
        there = ~np.isnan(columns["score"])
        given = columns["score"][there].astype(np.float64)
        ours = logits[there, 0].astype(np.float64)
        return Measured(len(given), lambda some: of_scores(ours[some], given[some]))

    def targets(self, labels: Tensors, there_EP: Tensor) -> Tensor:
        """Return the scores."""
        return labels["score"].float()


class _ByToken(Head):
    def total(self, values: Tensor, there_EP: Tensor) -> Tensor:
        """Return the sum over examples of the mean over their tokens."""
        return ((values * there_EP).sum(1) / there_EP.sum(1).clamp(min=1)).sum()


class Tags(_ByToken):
    """Predict a class of each word, at its first piece."""

    kind, output, metric = "token_classification", "tags", "entity f1"
    columns = ("tags",)
    by_token = ("tags", "teacher_logits")

    def loss(self, logits: Tensor, labels: Tensors, there_EP: Tensor) -> Tensor:
        """Return CE(z, y) of each word."""
        tags_N = labels["tags"].long().flatten()
        return cross_entropy(logits.flatten(0, 1), tags_N, reduction="sum")

    def decided(self, logits: NDArray[Any], columns: Columns) -> NDArray[Any]:
        """Return the predicted tags, only at tokens with a label (the first of each word)."""
        chosen = logits.argmax(-1)
        found: NDArray[Any] = chosen[columns["tags"][:, : chosen.shape[1]] != IGNORE]
        return found

    def measured(self, rows: LabelledRows, columns: Columns, logits: NDArray[Any]) -> Measured:
        """Return the F1 of entities, and the share of right words."""
        chosen, names_of = _chosen(logits), [*rows.names, "?"]  # the last one: no choice
        found, right, words = [], [], []
        for given, ours in zip(columns["tags"], chosen, strict=True):
            there = given != IGNORE
            found.append(counts(*([names_of[i] for i in some[there]] for some in (given, ours))))
            right.append(np.count_nonzero(given[there] == ours[there]))
            words.append(np.count_nonzero(there))
        table, num_right, num_words = np.array(found), np.array(right), np.array(words)

        def statistics(some: NDArray[np.int64]) -> dict[str, float]:
            hits, guessed, known = table[some].sum(0)
            both = guessed + known
            accuracy = float(num_right[some].sum() / max(1, num_words[some].sum()))
            return {"entity f1": 2 * float(hits) / both if both else 0.0, "accuracy": accuracy}

        return Measured(len(table), statistics)

    def slots(self, there_EP: Tensor) -> Tensor:
        """Return where tokens are."""
        return there_EP

    def outputs(self, logits: Tensor, there_EP: Tensor) -> Tensor:
        """Return the logits of the tokens."""
        return logits[there_EP]

    def targets(self, labels: Tensors, there_EP: Tensor) -> Tensor:
        """Return the tags of the tokens."""
        return labels["tags"][there_EP]


class Span(_ByToken):
    """Predict the first and the last token of an answer."""

    kind, output, metric = "question_answering", "span", "f1"
    columns = ("start", "end")
    by_token, has_classes, whole_texts = ("teacher_logits",), False, True

    def width(self, names: Sequence[str]) -> int:
        """Return 2."""
        return 2

    def loss(self, logits: Tensor, labels: Tensors, there_EP: Tensor) -> Tensor:
        """Return (CE(z_start, y_start) + CE(z_end, y_end)) / 2."""
        ends_E2P = ends(logits, there_EP)
        losses = [
            cross_entropy(ends_E2P[:, i], labels[name].long(), reduction="sum")
            for i, name in enumerate(self.columns)
        ]
        return (losses[0] + losses[1]) / 2

    def soft(self, s: Tensor, t: Tensor, there_EP: Tensor, temperature: float | None) -> Tensor:
        """Return the mean of both ends, each a distribution over the tokens of a row."""
        if temperature is None:
            return super().soft(s, t, there_EP, None)
        values_E2 = divergence(ends(s, there_EP), ends(t, there_EP), temperature)
        return (values_E2 * there_EP[:, :1]).sum() * 0.5 * temperature**2

    def decided(self, logits: NDArray[Any], columns: Columns) -> NDArray[Any]:
        """Return the tokens of both ends: those of a row compete."""
        return logits.argmax(1).flatten()

    def measured(self, rows: LabelledRows, columns: Columns, logits: NDArray[Any]) -> Measured:
        """Choose the best answer of all rows of a question, and compare it with the data's."""
        shards, known = rows.shards, rows.texts()
        # SQuAD 2 has questions without an answer; then nothing may be the best one.
        may_lack = any(example["answers"] == [] for example in known)
        task = shards.manifest.content[EXAMPLES]
        backend = of_shards(shards.folder, shards.manifest).backend
        cut = {"stride": task["stride"], "strategy": "only_second"}
        backend.enable_truncation(task["max_length"], **cut)
        row, pairs = 0, []
        for example in known:
            encoding = backend.encode(example["text"], example["pair"])
            best, nothing = (-np.inf, ""), np.inf
            for part in (encoding, *encoding.overflowing):
                assert rows.ids[row] == example["id"]
                inside = np.array([number == 1 for number in part.sequence_ids])
                size = len(inside)
                score, first, last = best_span(logits[row, :size, 0], logits[row, :size, 1], inside)
                begin, end = part.offsets[first][0], part.offsets[last][1]
                best = max(best, (score, example["pair"][begin:end].strip()))
                nothing = min(nothing, float(logits[row, 0].sum()))
                row += 1
            if example["answers"] is None:  # it has no label
                continue
            if may_lack and nothing > best[0]:
                best = (nothing, "")
            answers = [text for _, text in example["answers"]]
            pairs.append((exact_match(best[1], answers), f1(best[1], answers)))
        table = np.array(pairs)

        def statistics(some: NDArray[np.int64]) -> dict[str, float]:
            exact, common = table[some].mean(0)
            return {"f1": float(common), "exact match": float(exact)}

        return Measured(len(table), statistics)

    def slots(self, there_EP: Tensor) -> Tensor:
        """Return two for each example."""
        return torch.ones_like(there_EP[:, :1]).expand(-1, 2)

    def outputs(self, logits: Tensor, there_EP: Tensor) -> Tensor:
        """Return the logits of each end over the tokens of its row."""
        return ends(logits, there_EP).flatten(0, 1)

    def targets(self, labels: Tensors, there_EP: Tensor) -> Tensor:
        """Return the tokens of both ends."""
        return torch.stack([labels[name] for name in self.columns], dim=1).flatten()


_ALL = (Classes(), Score(), Tags(), Span())
HEADS: Mapping[str, Head] = {head.kind: head for head in _ALL}


def head_for(kind: str) -> Head:
    """Return what examples of a kind are measured by; a similarity is a score."""
    return HEADS.get(kind, HEADS["regression"])


def head_of(labels: Tensors) -> Head:
    """Return the head that predicts the labels of a batch."""
    return next(head for head in _ALL if head.columns[0] in labels)


def ends(logits_EP2: Tensor, there_EP: Tensor) -> Tensor:
    """Return the logits of starts and ends [E, 2, P], with no chance for padding."""
    lowest = -1e30  # finite, so that a row without tokens has a gradient of 0 and not NaN
    return logits_EP2.masked_fill(~there_EP[..., None], lowest).mT


def divergence(s: Tensor, t: Tensor, temperature: float) -> Tensor:
    """Return KL(softmax(t / T) || softmax(s / T)) over the last axis."""
    log_s, log_t = ((wide(z) / temperature).log_softmax(-1) for z in (s, t))
    return kl_div(log_s, log_t, reduction="none", log_target=True).sum(-1)


def _chosen(logits: NDArray[np.float32]) -> NDArray[np.int64]:
    """Return the class with the highest logit; -1 of a model that diverged, which chooses none."""
    return np.where(np.isfinite(logits).all(-1), logits.argmax(-1), -1)
