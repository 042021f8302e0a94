"""Add up what LM heads say at masked tokens, by rows, and make figures with intervals of the sums.

A figure is a mean over tokens, with the interval of a bootstrap over rows: the tokens of a row are
not independent.

Shapes: R rows, N masked tokens, V vocabulary, S resamples.
"""

from __future__ import annotations

import json

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from data_prep.shards import ShardSet, read_listed
from data_prep.shards.manifest import TOKEN_COUNTS
from pretrain.monitor.figures import Figure, interval, resamples
from pretrain.objectives.vocabulary_terms import cross_entropy, kl_divergence
from pretrain.tasks.mlm.head_figures import is_correct

OF_RANKS = "accuracy of ranks "
OF_LAYER = "cosine of layer "
MEANINGS = {
    "accuracy": "share of the masked tokens that a model guesses; guessing: the most frequent one",
    "agreement": "share of them where a model and the teacher guess the same",
    "top 5": "share of the teacher's five most likely tokens that are among the model's five",
    "loss": "masked cross-entropy in nats; guessing: from the tokens' frequencies",
    "perplexity": "e to the loss",
    "kl": "divergence of a model from the teacher at masked tokens, in nats",
    OF_RANKS: "accuracy by the tokens' ranks in the training rows, the most frequent first",
    OF_LAYER: "of the outputs of a layer, from 0, and of the teacher's at that share of its depth",
}
_LAST_RANKS = (100, 1_000, 10_000)  # last rank of each band; the rarest band has none
_TOP = 5


class HeadSums:
    """Hold the sums of one model.

    Args:
        num_rows: R.
        bands_V: the band of each token; see `frequency_bands`.
    """

    def __init__(self, num_rows: int, bands_V: NDArray[np.int64]) -> None:
        self._num_rows, self._bands_V = num_rows, bands_V
        self._sums: dict[str, NDArray[np.float64]] = {}  # [2, R]: of values, and their number

    @property
    def tokens(self) -> int:
        """Return how many masked tokens were added."""
        return int(self._sums["accuracy"][1].sum())

    def add(self, name: str, rows_N: NDArray[np.int64], values_N: Tensor) -> None:
        """Add values of tokens to a figure."""
        sums_2R = self._sums.setdefault(name, np.zeros((2, self._num_rows)))
        values = values_N.double().cpu().numpy()  # device sync
        sums_2R[0] += np.bincount(rows_N, weights=values, minlength=self._num_rows)
        sums_2R[1] += np.bincount(rows_N, minlength=self._num_rows)

    def add_right(
        self, rows_N: NDArray[np.int64], labels_N: NDArray[np.int64], right_N: Tensor
    ) -> None:
        """Add which guesses are right, of all tokens and of each band."""
        self.add("accuracy", rows_N, right_N)
        bands_N = self._bands_V[labels_N]
        for band in np.unique(bands_N):
            (some,) = np.nonzero(bands_N == band)
            self.add(OF_RANKS + _ranks(int(band)), rows_N[some], right_N.cpu()[some])

    def add_logits(
        self,
        rows_N: NDArray[np.int64],
        labels_N: NDArray[np.int64],
        ours_NV: Tensor,
        theirs_NV: Tensor | None = None,
    ) -> None:
        """Add what logits at masked tokens say, beside those of a teacher."""
        labels = torch.from_numpy(labels_N).to(ours_NV.device)
        self.add_right(rows_N, labels_N, is_correct(ours_NV, labels))
        self.add("loss", rows_N, cross_entropy(ours_NV, labels))
        if theirs_NV is None:
            return
        self.add("kl", rows_N, kl_divergence(ours_NV, theirs_NV, temperature=1.0))
        self.add("agreement", rows_N, is_correct(ours_NV, theirs_NV.argmax(-1)))
        top = min(_TOP, ours_NV.shape[-1])
        first, second = (logits.topk(top).indices for logits in (ours_NV, theirs_NV))
        self.add("top 5", rows_N, (first[:, :, None] == second[:, None]).sum((1, 2)) / top)

    def figures(self) -> dict[str, Figure]:
        """Return the mean of each figure with its interval, in the order of `MEANINGS`."""
        drawn: dict[str, list[float]] = {name: [] for name in self._sums}
        for some in resamples(self._num_rows):
            times_R = np.bincount(some, minlength=self._num_rows)
            for name, (sums_R, counts_R) in self._sums.items():
                with np.errstate(invalid="ignore"):  # a resample without such a token
                    drawn[name].append((times_R @ sums_R) / (times_R @ counts_R))
        found = {}
        for name in sorted(self._sums, key=_place):
            sums_R, counts_R = self._sums[name]
            found[name] = interval(float(sums_R.sum() / counts_R.sum()), drawn[name])
            if name == "loss":
                with np.errstate(over="ignore"):  # a diverged model's is infinite
                    perplexity = np.exp([x for x in found["loss"] if x is not None])
                found["perplexity"] = Figure(*perplexity.tolist())
        return found


def frequency_bands(shards: ShardSet) -> NDArray[np.int64]:
    """Return the band [V] of each token's rank in the training rows; ties in the order of ids."""
    counts = json.loads(read_listed(shards.folder, shards.manifest, TOKEN_COUNTS))["counts"]
    ranks_V = np.empty(len(counts), np.int64)
    ranks_V[np.argsort(-np.array(counts), kind="stable")] = np.arange(1, len(counts) + 1)
    return np.searchsorted(_LAST_RANKS, ranks_V)


def _ranks(band: int) -> str:
    first = 1 if band == 0 else _LAST_RANKS[band - 1] + 1
    return f"{first}-{_LAST_RANKS[band]}" if band < len(_LAST_RANKS) else f"{first} on"


def _place(name: str) -> tuple[int, int]:
    known = name
    number = 0
    for prefix in (OF_RANKS, OF_LAYER):
        if name.startswith(prefix):
            known, number = prefix, int(name.removeprefix(prefix).split("-")[0].split()[0])
    return list(MEANINGS).index(known), number
