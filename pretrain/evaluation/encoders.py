"""Encode texts with a sentence encoder, and measure a student's vectors beside its teacher's.

Shapes: n texts or pairs, W and V widths of vectors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from data_prep.examples.labelled_files import read_records
from data_prep.examples.values import as_number
from data_prep.messages import warn
from data_prep.shards import Segments, open_shards
from data_prep.tokens import of_shards
from pretrain import RunError
from pretrain.evaluation.validation import students_at_start
from pretrain.model.folder import Loaded, model_config, read_model
from pretrain.model.pooling import SentenceHead
from pretrain.model.sentences import TextEncoder, read_head
from pretrain.model.session import OnnxEncoder, model_folder
from pretrain.model.teacher import Teacher
from pretrain.model.vocabulary_file import read_tokenizer
from pretrain.monitor.figures import Figure, interval, resamples, share
from pretrain.run_folder import onnx_file
from pretrain.tasks.task_metrics import pearson, places, ranks, spearman

DOCUMENTS = 512  # so many make 131,000 pairs
FEWEST_PAIRS = 5
_COLUMNS = ("sentence1", "sentence2", "score")
_STSB = (5, 6, 4)  # the places of these in STS-B's own file, which names none
Vectors = NDArray[np.float32]
MEANINGS = {
    "cosine": "mean cosine of the model's and the teacher's vector of a text",
    "similarity": "Spearman's correlation of the similarities of all pairs of texts",
    "neighbour": "share of texts whose nearest other text is the same as for the teacher",
    "pearson": "correlation of the similarity of two texts with their score",
    "spearman": "the same, of ranks",
    "mixed": "pearson, with the first text of a pair encoded by the teacher",
}


def encode(model: Path | str, texts: Sequence[str], *, normalize: bool = False) -> Vectors:
    """Return the vectors [n, W] of texts, as sentence-transformers would compute them.

    Args:
        model: an exported folder, a run, or a hub's name. A folder without `modules.json` is an
            encoder, whose vector is the mean over all tokens.
        texts: each is cut at the length that the folder says.
        normalize: return vectors of length 1, whose products are cosines. A folder with the module
            `Normalize` does so by itself.

    Raises:
        RunError: it cannot be read, or has no tokenizer.json.
    """
    if isinstance(texts, str) or not all(isinstance(text, str) for text in texts):
        raise RunError("encode: texts must be a list of strings, such as ['a text']")
    vectors = load_encoder(str(model))(list(texts))
    return unit(vectors).astype(np.float32) if normalize else vectors


def is_encoder(name: str) -> bool:
    """Return whether a model has no trained LM head, as its config.json says."""
    file = onnx_file(Path(name))
    names = model_config(name, str(model_folder(file)) if file else name).get("architectures")
    return not (isinstance(names, list) and names and str(names[0]).endswith("ForMaskedLM"))


def load_encoder(name: str, tokenizer: str = "") -> TextEncoder | OnnxEncoder:
    """Return an encoder with the modules behind it; RunError if it cannot be read.

    `tokenizer` is the content of a tokenizer.json, for a folder that has none.
    """
    if onnx_file(Path(name)) is not None:
        return OnnxEncoder(name)

    def read(loaded: Loaded) -> TextEncoder:
        model, folder, saved = loaded.model, loaded.folder, loaded.saved
        head = read_head(name, folder, model.config.hidden_size)
        # In a checkpoint the dense layer is not yet a module of the folder.
        if saved is not None and (vectors := saved.state.get("vectors")):
            found, identity = saved.adapters(), "torch.nn.modules.linear.Identity"
            dense = [(found["dense.weight"], found["dense.bias"], identity)] if found else []
            head = SentenceHead(
                model.config.hidden_size,
                dense=dense,
                normalised=vectors["normalised"],
                longest=saved.state["row_length"],
            )
        text = read_tokenizer(name, folder) or tokenizer
        if not text:
            raise RunError(
                f"{name}: no tokenizer.json; add it, or let it read the student's tokens with "
                "--same-vocabulary"
            )
        return TextEncoder(model.eval(), head, name, text)

    return read_model(name, read, needs_head=False)


def untrained(models: Sequence[str], teacher: TextEncoder | OnnxEncoder) -> dict[str, TextEncoder]:
    """Return the students of runs as they were at step 0; see `students_at_start`.

    There are none of a teacher that is an ONNX file.
    """
    if isinstance(teacher, OnnxEncoder):
        return {}
    frozen = Teacher(teacher.model, teacher.who, True, None, sha256="")
    return {
        name: TextEncoder(
            model, SentenceHead(model.config.hidden_size), name, teacher.tokenizer.to_str()
        )
        for name, model in students_at_start(models, frozen, needs_head=False).items()
    }


def validation_texts(shards: Path, most: int = DOCUMENTS) -> list[str]:
    """Return up to `most` whole documents of a corpus's validation rows, evenly spaced.

    They are the kept texts, or the tokens turned back into text; the pieces in its rows, if all
    documents are longer than these.
    """
    rows = open_shards(shards, "validation")
    manifest, segments = rows.manifest, Segments(rows)
    found, texts = segments.of_rows(np.arange(len(rows))), list[str]()
    if manifest.has_texts:
        texts = [text for text in segments.texts(0, len(segments)) if text is not None]
    if not texts:
        tokens, special = of_shards(shards, manifest), manifest.tokenizer.special_ids
        ids = rows.rows(np.arange(len(rows))).flatten().astype(np.int64)
        ids = ids[ids != special.pad]
        pieces = np.split(ids, np.flatnonzero(ids == special.cls))[1:]
        if not found.whole.any():
            warn(f"{shards}: no validation document is whole; the pieces in its rows are compared")
        whole = found.whole if found.whole.any() else np.ones(len(pieces), bool)
        some = [piece for piece, kept in zip(pieces, whole, strict=True) if kept]
        texts = [tokens.backend.decode(piece.tolist()) for piece in some]
    return [texts[i * len(texts) // min(most, len(texts))] for i in range(min(most, len(texts)))]


def example_texts(shards: Path, most: int) -> list[str]:
    """Return up to `most` validation examples of a task as texts, without special tokens."""
    rows = open_shards(shards, "validation")
    tokens = of_shards(shards, rows.manifest)
    places = np.arange(min(most, len(rows))) * len(rows) // max(1, min(most, len(rows)))
    ids = [[int(id) for id in row] for row in rows.rows(places)]
    return [tokens.backend.decode(row, skip_special_tokens=True) for row in ids]


def read_pairs(file: Path) -> tuple[list[str], list[str], NDArray[np.float64]]:
    """Return both texts of each pair, and their scores, of a table or STS-B's own file.

    Raises:
        CorpusError: see `read_records`.
        RunError: it has no columns sentence1, sentence2 and score, or a score is not a number.
    """
    first = next(read_records(file, False, warn), {})
    # A line of names, or the keys of each record.
    names = {str(name).strip().lower(): name for name in (first.values() if 0 in first else first)}
    named = set(_COLUMNS) <= set(names)
    one, other, score = (names[name] for name in _COLUMNS) if named else _STSB
    rows = [row for row in read_records(file, named, warn) if row]
    try:
        if not first:
            raise ValueError("an empty file")
        scores = np.array([as_number(str(file), score, row[score]) for row in rows])
        texts = [row[column] for column in (one, other) for row in rows]
        if not all(isinstance(text, str) for text in texts):
            raise ValueError("a text that is none")
        return texts[: len(rows)], texts[len(rows) :], scores
    except (ValueError, KeyError, TypeError):
        raise RunError(
            f"{file}: is not a table of pairs: its first line must name the columns "
            f"{', '.join(_COLUMNS)}, each score must be a number and each sentence a text"
        ) from None


def scored_pairs(file: Path) -> tuple[list[str], list[str], NDArray[np.float64]]:
    """Return the pairs of `read_pairs`; refuse scores that a correlation is not defined of."""
    first, second, scores = read_pairs(file)
    if len(scores) < FEWEST_PAIRS or not np.isfinite(scores).all() or np.ptp(scores) == 0:
        raise RunError(
            f"{file}: has {len(scores)} pairs; a correlation needs {FEWEST_PAIRS} or more, "
            "with scores that are finite and not all equal"
        )
    return first, second, scores


def compare_vectors(student: Vectors, teacher: Vectors) -> dict[str, Figure]:
    """Return how similar a student's vectors [n, W] are to its teacher's [n, V], of the same texts.

    Returns:
        cosine: mean cosine of both vectors of a text, if W = V; similarity: Spearman's correlation
        of the cosines of all pairs of texts; neighbour: the share of texts whose nearest other text
        is the same for both.
    """
    ours, theirs = unit(student), unit(teacher)
    found = {}
    if ours.shape[1] == theirs.shape[1]:
        cosines = (ours * theirs).sum(1)
        found["cosine"] = of_items(lambda drawn: float(cosines[drawn].mean()), len(ours))
    s, t = ours @ ours.T, theirs @ theirs.T

    first, second = np.triu_indices(len(ours), 1)
    orders = [places(cosines[first, second]) for cosines in (s, t)]

    def of_pairs(drawn: NDArray[np.int64]) -> float:
        # A text that was drawn twice makes each of its pairs twice, and is no pair with itself.
        num = np.bincount(drawn, minlength=len(ours))
        times = (num[first] * num[second]).astype(np.float64)
        if not times.any():  # a single text
            return np.nan
        both = [ranks(order, times) for order in orders]
        (xx, xy), (_, yy) = np.cov(both, bias=True, aweights=times)
        return float(xy / np.sqrt(xx * yy))

    found["similarity"] = of_items(of_pairs, len(ours))
    np.fill_diagonal(s, -np.inf)
    np.fill_diagonal(t, -np.inf)
    same = s.argmax(1) == t.argmax(1)
    found["neighbour"] = share(float(same.mean()), len(ours))
    return found


def compare_with_scores(
    first: Vectors, second: Vectors, scores: NDArray[np.float64]
) -> dict[str, Figure]:
    """Return Pearson's and Spearman's correlation of the pairs' cosines with people's scores."""
    return {
        "pearson": correlation(pearson, first, second, scores),
        "spearman": correlation(spearman, first, second, scores),
    }


def correlation(
    kind: Callable[..., float], first: Vectors, second: Vectors, scores: NDArray[np.float64]
) -> Figure:
    """Return one correlation of the pairs' cosines with people's scores."""
    cosines = (unit(first) * unit(second)).sum(1)
    return of_items(lambda drawn: kind(cosines[drawn], scores[drawn]), len(scores))


def of_items(statistic: Callable[[NDArray[np.int64]], float], size: int) -> Figure:
    """Return a statistic of `size` items with the interval of a bootstrap over them."""
    # A few pairs drawn again may have equal scores, whose correlation is not defined.
    with np.errstate(invalid="ignore", divide="ignore"):
        drawn = [statistic(some) for some in resamples(size)]
    return interval(statistic(np.arange(size)), drawn)


def unit(vectors: Vectors) -> NDArray[np.float64]:
    """Return vectors of length 1; RunError if one is not finite."""
    wide = vectors.astype(np.float64)
    if not np.isfinite(wide).all():
        raise RunError("a vector is not finite: its model diverged; train it at a lower rate")
    found: NDArray[np.float64] = wide / np.maximum(
        np.linalg.norm(wide, axis=1, keepdims=True), 1e-12
    )
    return found


def evaluate_encoders(
    models: Sequence[str],
    data: Path,
    teacher: str | None,
    say: Callable[[str], None] = warn,
    *,
    same_vocabulary: bool = False,
    documents: int = DOCUMENTS,
) -> dict[str, dict[str, Figure]]:
    """Measure encoders on validation documents of shards, or on a file of pairs with scores.

    The teacher also gets a row, and so does each run's student as it was before training. With
    `same_vocabulary` a teacher without tokenizer.json reads the first model's tokens.

    Returns:
        the figures of each model, by name; see `compare_vectors` and `compare_with_scores`. With a
        file of pairs and a teacher of the same width also "mixed": Pearson's correlation where the
        teacher encodes the first text of each pair and the student the second.
    """
    encoders = {name: load_encoder(name) for name in models}
    if teacher is not None:
        fallback = encoders[models[0]].tokenizer.to_str() if same_vocabulary else ""
        encoders = {teacher: load_encoder(teacher, fallback), **encoders}
        encoders |= untrained(models, encoders[teacher])
    if data.is_file():
        first, second, scores = scored_pairs(data)
        say(f"{len(scores):,} pairs of {data}")
        vectors = {name: encoder([*first, *second]) for name, encoder in encoders.items()}
        found = {}
        for name, both in vectors.items():
            found[name] = compare_with_scores(both[: len(scores)], both[len(scores) :], scores)
            if teacher in vectors and both.shape == vectors[teacher].shape and name != teacher:
                found[name]["mixed"] = correlation(
                    pearson, vectors[teacher][: len(scores)], both[len(scores) :], scores
                )
        return found
    if teacher is None:
        raise RunError("encoders are compared with a teacher: add --teacher NAME")
    texts = validation_texts(data, documents)
    say(f"{len(texts):,} validation documents of {data}")
    vectors = {name: encoder(texts) for name, encoder in encoders.items()}
    return {name: compare_vectors(found, vectors[teacher]) for name, found in vectors.items()}
