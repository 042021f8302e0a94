"""Measure language-model heads on masked validation rows, beside their teacher and plain guesses.

Rows and masks are the same every time: every selected token becomes [MASK].

Shapes: B rows of a batch, L row length, N masked tokens, T tokens, D width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import cosine_similarity

from data_prep.shards import ShardSet, check, open_shards
from pretrain.contracts.batch import IGNORE, Batch
from pretrain.contracts.packing import find_documents
from pretrain.contracts.terms import Signal
from pretrain.deploy.heads import check_fit, head_of, logits_at_masks, masked_documents
from pretrain.deploy.session import model_folder
from pretrain.device.gpu import check_kernels
from pretrain.evaluate import students_at_start
from pretrain.head_sums import OF_LAYER, HeadSums, frequency_bands
from pretrain.kernels.cpu_layers import use_cpu_layers
from pretrain.model.families import MaskedLM, encode, family_of, shape_of
from pretrain.model.folder import Loaded, read_model
from pretrain.model.loading import check_row_length
from pretrain.model.teacher import Teacher, check_vocabulary, load_teacher
from pretrain.monitor.figures import Figure
from pretrain.plan import default_layers
from pretrain.run_folder import onnx_file
from pretrain.tasks.mlm.examples import MaskedRows, evaluation_masking
from pretrain.tasks.mlm.head_figures import unigram

GUESSING = "guessing"  # the row of plain guesses
_ROWS = 32  # at a time
_LOGITS = 1 << 25  # at a time
Sums = tuple[HeadSums, HeadSums]  # a model's, and its teacher's


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

    With an ONNX file among them all models read padded documents. Their figures are those of packed
    rows, without the cosines of layers.

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
        the figures of each model, see `head_sums.MEANINGS`; the teacher's first, guesses last.

    Raises:
        RunError, CorpusError: a model, teacher or shards cannot be used, or do not fit together.
    """
    manifest, required = check(shards), not same_vocabulary
    masked = _MaskedRows(open_shards(shards, "validation"), rows)
    found: dict[str, Sums] = {}
    if any(onnx_file(Path(name)) for name in [*models, teacher or ""]):
        for name in [*models, *([teacher] if teacher is not None else [])]:
            file = onnx_file(Path(name))
            folder = model_folder(file) if file else read_model(name, lambda loaded: loaded.folder)
            check_fit(name, folder, manifest, required=required)
        found = {name: masked.run_padded(name, teacher) for name in models}
    else:
        known: Teacher | None = None
        for name in models:

            def fits(loaded: Loaded, name: str = name) -> MaskedLM:
                config = loaded.model.config
                check_vocabulary(name, loaded.folder, config, manifest, required=required)
                check_row_length(name, config, manifest)
                return loaded.model

            model = read_model(name, fits, warn=warn)
            if teacher is not None and known is None:
                known = load_teacher(teacher, manifest, shards, same_vocabulary=same_vocabulary)
            found[name] = masked.run_packed(model, None if known is None else known.model)
        if known is not None and starts:
            for name, model in students_at_start(models, known).items():
                found[name] = masked.run_packed(model, known.model)
    guesses = masked.guesses()
    say(f"{guesses.tokens:,} masked tokens of {shards}")
    of_teacher = {teacher: next(iter(found.values()))[1].figures()} if teacher is not None else {}
    return {
        **of_teacher,
        **{name: sums.figures() for name, (sums, _) in found.items()},
        GUESSING: guesses.figures(),
    }


class _Block(NamedTuple):
    """Hold some validation rows, and the tokens that are masked in them."""

    batch: Batch  # on the host
    rows_N: NDArray[np.int64]
    places_N: Tensor  # in the block's B * L positions
    labels_N: NDArray[np.int64]


class _MaskedRows:
    """Run models on validation rows."""

    def __init__(self, split: ShardSet, rows: int) -> None:
        self.split, self.num_rows = split, min(rows, len(split))
        self.bands_V = frequency_bands(split)
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        check_kernels(self.device)

    def sums(self) -> HeadSums:
        """Return the sums of one model, still empty."""
        return HeadSums(self.num_rows, self.bands_V)

    def blocks(self) -> Iterator[_Block]:
        """Yield the rows in blocks, masked."""
        examples = MaskedRows(self.split, evaluation_masking(self.split.manifest, 0.15))
        for first in range(0, self.num_rows, _ROWS):
            some = np.arange(first, min(first + _ROWS, self.num_rows))
            rows = examples.rows(self.split.rows(some), np.zeros_like(some), some)
            block, slots = torch.nonzero(rows["masked"] != IGNORE, as_tuple=True)
            places = block * rows["input_ids"].shape[1] + rows["positions"][block, slots]
            labels = rows["masked"][block, slots].numpy().astype(np.int64)
            yield _Block(examples.batch(rows), some[block.numpy()], places, labels)

    def guesses(self) -> HeadSums:
        """Return the sums of the most frequent label, and of the tokens' frequencies."""
        found, unigram_V = self.sums(), unigram(self.split)
        blocks = [(block.rows_N, block.labels_N) for block in self.blocks()]
        rows_N, labels_N = (np.concatenate(part) for part in zip(*blocks, strict=True))
        most = np.bincount(labels_N, minlength=1).argmax()
        found.add_right(rows_N, labels_N, torch.from_numpy(labels_N == most))
        found.add("loss", rows_N, unigram_V[torch.from_numpy(labels_N)])
        return found

    def run_padded(self, name: str, teacher: str | None) -> Sums:
        """Run an ONNX file or another model, and a teacher, on documents one by one."""
        tokenizer = self.split.manifest.tokenizer
        pad, num = tokenizer.special_ids.pad, tokenizer.vocab_size  # more embeddings are padding
        documents = list(masked_documents(self.split.folder, np.arange(self.num_rows)))
        ours, theirs = self.sums(), self.sums()
        known: Iterator[NDArray[np.float32] | None] = iter([None] * len(documents))
        if teacher is not None:
            known = logits_at_masks(head_of(teacher), documents, pad)
        logits = logits_at_masks(head_of(name), documents, pad)
        for document, ours_NV, theirs_NV in zip(documents, logits, known, strict=True):
            rows_N = np.full(len(document.labels), document.row)
            other = None if theirs_NV is None else torch.from_numpy(theirs_NV[:, :num])
            ours.add_logits(rows_N, document.labels, torch.from_numpy(ours_NV[:, :num]), other)
            if other is not None:
                theirs.add_logits(rows_N, document.labels, other)
        return ours, theirs

    @torch.inference_mode()
    def run_packed(self, student: MaskedLM, teacher: MaskedLM | None) -> Sums:
        """Run a model, and a teacher, on packed rows."""
        ours, theirs = self.sums(), self.sums()
        for model in (student, teacher):
            if model is not None:
                torch.nn.Module.to(model, self.device)
                use_cpu_layers(model.eval())
        layers = _layers(student, teacher)
        student_needs = frozenset(Signal("hidden", i) for i, _ in layers)
        teacher_needs = frozenset(Signal("hidden", j) for _, j in layers)
        pad_id = self.split.manifest.tokenizer.special_ids.pad
        at_once = max(1, _LOGITS // self.split.manifest.tokenizer.vocab_size)
        for number, block in enumerate(self.blocks()):
            batch = block.batch.to(self.device)
            packing = find_documents(*batch[:3], pad_id=pad_id)
            s = encode(student, batch.input_ids, packing, student_needs)
            t = None
            if teacher is not None:
                t = encode(teacher, batch.input_ids, packing, teacher_needs)
                rows_T = packing.token_mask.nonzero()[:, 0].cpu().numpy() + number * _ROWS
                for i, j in layers:
                    one, other = s.signals[Signal("hidden", i)], t.signals[Signal("hidden", j)]
                    cosines_BL = cosine_similarity(one.float(), other.float(), dim=-1)
                    ours.add(f"{OF_LAYER}{i}", rows_T, cosines_BL[packing.token_mask])
            for begin in range(0, len(block.labels_N), at_once):
                some = slice(begin, begin + at_once)
                rows_N, labels_N = block.rows_N[some], block.labels_N[some]
                places_N = block.places_N[some].to(self.device)
                ours_NV = self._logits(student, s.last_hidden_state, places_N)
                theirs_NV = None
                if teacher is not None and t is not None:
                    theirs_NV = self._logits(teacher, t.last_hidden_state, places_N)
                    theirs.add_logits(rows_N, labels_N, theirs_NV)
                ours.add_logits(rows_N, labels_N, ours_NV, theirs_NV)
        return ours, theirs

    def _logits(self, model: MaskedLM, hidden_BLD: Tensor, places_N: Tensor) -> Tensor:
        hidden_ND = hidden_BLD.flatten(0, 1).index_select(0, places_N)
        found = family_of(model).projection(model, hidden_ND)
        return found.first(self.split.manifest.tokenizer.vocab_size).logits(slice(None), None)


def _layers(student: MaskedLM, teacher: MaskedLM | None) -> list[tuple[int, int]]:
    """Return (student layer, teacher layer) pairs that are compared; none if widths differ.

    They are those that a student of its depth would be copied from.
    """
    if teacher is None:
        return []
    ours, theirs = shape_of(student), shape_of(teacher)
    if ours.hidden_size != theirs.hidden_size or ours.num_layers > theirs.num_layers:
        return []
    return list(enumerate(default_layers(theirs.num_layers, ours.num_layers)))
