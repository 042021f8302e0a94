"""Measure language-model heads on masked validation rows, beside their teacher and plain guesses.

Rows and masks are the same every time: every selected token becomes [MASK]. A figure is a mean over
tokens, with the interval of a bootstrap over rows: the tokens of a row are not independent.

Shapes: B rows of a block, L row length, N masked tokens, T tokens, D width, V vocabulary, R rows.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import cosine_similarity

from data_prep.shards import Manifest, ShardSet, check, open_shards, read_listed
from data_prep.shards.manifest import TOKEN_COUNTS
from pretrain import RunError
from pretrain.contracts.batch import IGNORE, Batch
from pretrain.contracts.packing import find_documents
from pretrain.contracts.terms import LOGITS, Signal
from pretrain.device.gpu import check_kernels
from pretrain.evaluation.validation import students_at_start
from pretrain.kernels.cpu_layers import use_cpu_layers
from pretrain.model.families import MaskedLM, encode, family_of, shape_of
from pretrain.model.folder import Loaded, read_model
from pretrain.model.loading import check_row_length
from pretrain.model.session import Session, batches, model_folder
from pretrain.model.teacher import Teacher, check_fit, load_teacher
from pretrain.model.vocabulary_file import check_vocabulary
from pretrain.monitor.figures import Figure, interval, resamples
from pretrain.objectives.vocabulary_terms import cross_entropy, kl_divergence
from pretrain.plan import default_layers
from pretrain.run_folder import onnx_file
from pretrain.tasks.mlm.examples import MaskedRows, evaluation_masking
from pretrain.tasks.mlm.head_figures import is_correct, unigram

GUESSING = "guessing"  # the row of plain guesses
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
_SHARE = 0.15  # of the tokens that is masked
_LOGITS = 1 << 25  # at a time
_IN_FILE = 1 << 15  # words of an ONNX file, for the texts of a batch


def evaluate_heads(
    models: Sequence[str],
    shards: Path,
    *,
    teacher: str | None = None,
    same_vocabulary: bool = False,
    rows: int = 1024,
    starts: bool = True,
    say: Callable[[str], None] = lambda _: None,
    warn: Callable[[str], None],
) -> dict[str, dict[str, Figure]]:
    """Measure runs' newest checkpoints, or any folders with a model or an ONNX file, in fp32.

    An ONNX file reads padded documents and gives no cosines of layers.

    Args:
        models: runs, folders or hub names.
        shards: a corpus.
        teacher: what the models are compared with.
        same_vocabulary: tokenizers may differ or be missing; see `RunConfig`.
        rows: of the validation split, at most.
        starts: with a teacher, measure the students of runs before training, too.
        say: receives the number of masked tokens.
        warn: receives what is odd about a model.

    Returns:
        the figures of each model, see `MEANINGS`; the teacher's first, guesses last.

    Raises:
        RunError, CorpusError: a model, teacher or shards cannot be used, or do not fit together.
    """
    manifest, split = check(shards), open_shards(shards, "validation")
    num_rows, bands_V = min(rows, len(split)), frequency_bands(split)
    check_kernels(_device())
    frozen: Teacher | None = None
    known: Head | None = None
    found, theirs = dict[str, HeadSums](), HeadSums(num_rows, bands_V)

    def run(name: str, head: Head) -> None:
        others = HeadSums(num_rows, bands_V) if found else theirs
        found[name] = ours = HeadSums(num_rows, bands_V)
        _run(head, known, masked_blocks(split, np.arange(num_rows)), ours, others)

    for name in models:
        head = open_head(name, manifest, same_vocabulary=same_vocabulary, warn=warn)
        if teacher is not None and known is None and onnx_file(Path(teacher)) is not None:
            known = open_head(teacher, manifest, same_vocabulary=same_vocabulary)
        elif teacher is not None and known is None:
            frozen = load_teacher(teacher, manifest, shards, same_vocabulary=same_vocabulary)
            known = Head(manifest, model=frozen.model)
        run(name, head)
    if frozen is not None and starts:
        for name, model in students_at_start(models, frozen).items():
            run(name, Head(manifest, model=model))
    guesses = _guesses(split, HeadSums(num_rows, bands_V), num_rows)
    say(f"{guesses.tokens:,} masked tokens of {shards}")
    return {
        **({teacher: theirs.figures()} if teacher is not None else {}),
        **{name: sums.figures() for name, sums in found.items()},
        GUESSING: guesses.figures(),
    }


class Block(NamedTuple):
    """Hold some rows of a split, and the tokens that are masked in them, in their order."""

    batch: Batch  # on the host
    rows_N: NDArray[np.int64]  # numbers among all rows that are read
    places_N: NDArray[np.int64]  # in the block's B * L positions
    labels_N: NDArray[np.int64]
    first: int  # number of its first row


def masked_blocks(split: ShardSet, numbers: NDArray[np.int64]) -> Iterator[Block]:
    """Yield rows of a split by their numbers, masked, in blocks whose logits fit into memory."""
    manifest = split.manifest
    examples = MaskedRows(split, evaluation_masking(manifest, _SHARE))
    of_row = _SHARE * manifest.row_length * manifest.tokenizer.vocab_size
    size = min(32, max(1, int(_LOGITS / of_row)))
    for first in range(0, len(numbers), size):
        some = numbers[first : first + size]
        rows = examples.rows(split.rows(some), np.zeros_like(some), some)
        labels = np.full(rows["input_ids"].shape, IGNORE, dtype=np.int64)
        masked, positions = rows["masked"].numpy(), rows["positions"].numpy()
        block, slots = np.nonzero(masked != IGNORE)
        labels[block, positions[block, slots]] = masked[block, slots]
        places = np.flatnonzero(labels != IGNORE)
        rows_N = first + places // labels.shape[1]
        yield Block(examples.batch(rows), rows_N, places, labels.flatten()[places], first)


class Head:
    """Compute the logits of a model, or of an ONNX file, at the masked tokens of a block.

    Args:
        manifest: of the shards.
        model: on the host; moved to this machine's GPU, if it has one.
        file: in its place, an ONNX file.
    """

    def __init__(
        self, manifest: Manifest, *, model: MaskedLM | None = None, file: Path | None = None
    ) -> None:
        self.num_tokens = manifest.tokenizer.vocab_size  # more embeddings are padding
        self.pad = manifest.tokenizer.special_ids.pad
        self.model, self.session = model, Session(file) if file is not None else None
        if model is not None:
            torch.nn.Module.to(model, _device())
            use_cpu_layers(model.eval())
        if self.session is not None and LOGITS not in self.session.outputs:
            raise RunError(
                f"{file}: has no LM head; its outputs are {sorted(self.session.outputs)}"
            )

    @torch.inference_mode()
    def __call__(self, block: Block, layers: Sequence[int] = ()) -> tuple[Tensor, list[Tensor]]:
        """Return logits [N, V], and of each of these layers the hidden states [T, D]."""
        if self.session is not None:
            return torch.from_numpy(self._of_documents(self.session, block)), []
        assert self.model is not None
        batch = block.batch.to(_device())
        packing = find_documents(*batch[:3], pad_id=self.pad)
        signals = [Signal("hidden", layer) for layer in layers]
        output = encode(self.model, batch.input_ids, packing, frozenset(signals))
        places = torch.from_numpy(block.places_N).to(batch.input_ids.device)
        hidden_ND = output.last_hidden_state.flatten(0, 1).index_select(0, places)
        projection = family_of(self.model).projection(self.model, hidden_ND)
        logits_NV = projection.first(self.num_tokens).logits(slice(None), None)
        return logits_NV, [output.signals[signal][packing.token_mask] for signal in signals]

    def _of_documents(self, session: Session, block: Block) -> NDArray[np.float32]:
        begins = block.batch.cu_seqlens.numpy().astype(np.int64)
        ids = block.batch.input_ids.numpy().flatten()
        cuts = np.searchsorted(block.places_N, begins)
        used = np.flatnonzero(np.diff(cuts))  # padding, and documents without a mask, have none
        documents = [ids[begins[i] : begins[i + 1]].tolist() for i in used]
        found = np.empty((len(block.places_N), self.num_tokens), dtype=np.float32)
        for numbers, padded, mask in batches(documents, self.pad, values=_IN_FILE):
            logits = session(LOGITS, padded, mask)
            for row, number in enumerate(used[numbers]):
                some = slice(cuts[number], cuts[number + 1])
                places = block.places_N[some] - begins[number]
                found[some] = logits[row, places, : self.num_tokens]
        return found


def open_head(
    name: str,
    manifest: Manifest,
    *,
    same_vocabulary: bool = False,
    warn: Callable[[str], None] = lambda _: None,
) -> Head:
    """Return the LM head of a model or an ONNX file.

    Raises:
        RunError: it has none, cannot be read, or its vocabulary or positions are not the shards'.
    """
    required = not same_vocabulary
    if (file := onnx_file(Path(name))) is not None:
        check_fit(name, model_folder(file), manifest, required=required)
        return Head(manifest, file=file)

    def fits(loaded: Loaded) -> MaskedLM:
        config = loaded.model.config
        check_vocabulary(name, loaded.folder, config, manifest, required=required)
        check_row_length(name, config, manifest)
        return loaded.model

    return Head(manifest, model=read_model(name, fits, warn=warn))


def _device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _run(
    head: Head, teacher: Head | None, blocks: Iterator[Block], ours: HeadSums, theirs: HeadSums
) -> None:
    """Add what a model, and a teacher, say of blocks."""
    pairs: list[tuple[int, int]] = []
    if teacher is not None and head.model is not None and teacher.model is not None:
        # Layers that a student of its depth would be copied from; none if widths differ.
        small, large = shape_of(head.model), shape_of(teacher.model)
        if small.hidden_size == large.hidden_size and small.num_layers <= large.num_layers:
            pairs = list(enumerate(default_layers(large.num_layers, small.num_layers)))
    for block in blocks:
        logits_NV, hidden = head(block, [i for i, _ in pairs])
        theirs_NV = None
        if teacher is not None:
            theirs_NV, others = teacher(block, [j for _, j in pairs])
            theirs_NV = theirs_NV.to(logits_NV.device)
            theirs.add_logits(block.rows_N, block.labels_N, theirs_NV)
            tokens = np.nonzero(block.batch.input_ids.numpy() != head.pad)[0] + block.first
            for (i, _), one, other in zip(pairs, hidden, others, strict=True):
                cosines_T = cosine_similarity(one.float(), other.float(), dim=-1)
                ours.add(f"{OF_LAYER}{i}", tokens, cosines_T)
        ours.add_logits(block.rows_N, block.labels_N, logits_NV, theirs_NV)


def _guesses(split: ShardSet, found: HeadSums, num_rows: int) -> HeadSums:
    """Add the most frequent label, and the loss of the tokens' frequencies."""
    unigram_V, blocks = unigram(split), masked_blocks(split, np.arange(num_rows))
    pairs = [(block.rows_N, block.labels_N) for block in blocks]
    rows_N, labels_N = (np.concatenate(part) for part in zip(*pairs, strict=True))
    most = np.bincount(labels_N, minlength=1).argmax()
    found.add_right(rows_N, labels_N, torch.from_numpy(labels_N == most))
    found.add("loss", rows_N, unigram_V[torch.from_numpy(labels_N)])
    return found


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
