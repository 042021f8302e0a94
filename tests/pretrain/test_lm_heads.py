"""Compare figures of LM heads with transformers' own models, one row and token at a time."""

import json
import math
import warnings
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.tiny import save_teacher, tiny_bert
from torch.nn.functional import cosine_similarity
from transformers import AutoModelForMaskedLM

from data_prep.shards import open_shards
from pretrain.contracts.packing import block_diagonal_mask, find_documents
from pretrain.evaluation.heads import GUESSING, HeadSums, evaluate_heads
from pretrain.tasks.mlm.examples import evaluation_masking, masked_batch
from pretrain.tasks.mlm.masking import Masked

ROWS = 6


def plain_sums(
    student: Any, teacher: Any, corpus: Path, pairs: list[tuple[int, int]]
) -> list[dict[str, list[float]]]:
    """Return of each row the values of each figure, a number a token."""
    shards = open_shards(corpus, "validation")
    counts = json.loads((corpus / "token_counts.json").read_text(encoding="utf-8"))["counts"]
    order = sorted(range(len(counts)), key=lambda token: (-counts[token], token))
    masking = evaluation_masking(shards.manifest, 0.15)
    found = []
    for row in range(ROWS):
        values: defaultdict[str, list[float]] = defaultdict(list)
        ids = shards.rows([row]).astype("int64")
        masked = Masked(*map(torch.from_numpy, masking(ids, np.array([0]), np.array([row]))))
        batch = masked_batch(*masked, cls_id=2, pad_id=0)
        packed = find_documents(batch.input_ids, batch.cu_seqlens, batch.max_length, pad_id=0)
        arguments = {"attention_mask": block_diagonal_mask(batch.cu_seqlens, *ids.shape)}
        arguments |= {"position_ids": packed.position_ids, "output_hidden_states": True}
        with torch.no_grad():
            ours, theirs = (m(masked.input_ids, **arguments) for m in (student, teacher))
        for i, j in pairs:  # entry 0 of hidden_states is the output of the embeddings
            cosines = cosine_similarity(
                ours.hidden_states[i + 1][0].double(), theirs.hidden_states[j + 1][0].double(), -1
            )
            values[f"cosine of layer {i}"] = cosines[torch.from_numpy(ids[0]) != 0].tolist()
        for position in (masked.input_ids[0] == 4).nonzero().flatten().tolist():
            label = int(ids[0, position])
            q, p = (out.logits[0, position].double() for out in (ours, theirs))
            log_q, log_p = q.log_softmax(0), p.log_softmax(0)
            right = float(q.argmax() == label)
            values["accuracy"].append(right)
            band = "1-100" if order.index(label) < 100 else "101-1000"
            values[f"accuracy of ranks {band}"].append(right)
            values["loss"].append(-float(log_q[label]))
            values["kl"].append(float((log_p.exp() * (log_p - log_q)).sum()))
            values["agreement"].append(float(q.argmax() == p.argmax()))
            best = [set(sorted(range(len(x)), key=lambda k: -float(x[k]))[:5]) for x in (q, p)]
            values["top 5"].append(len(best[0] & best[1]) / 5)
        found.append(values)
    return found


def means(rows: list[dict[str, list[float]]]) -> dict[str, float]:
    """Return the mean over all tokens of some rows, of each figure that they have."""
    found = {}
    for name in {name for row in rows for name in row}:
        values = [value for row in rows for value in row.get(name, [])]
        found[name] = sum(values) / len(values)
    return {**found, "perplexity": math.exp(found["loss"])}


def test_figures_and_intervals_equal_those_of_a_plain_loop(tmp_path: Path, corpus: Path) -> None:
    save_teacher(tmp_path / "student", tiny_bert(2, seed=1))
    save_teacher(tmp_path / "teacher", tiny_bert(3, seed=2))
    names = [str(tmp_path / name) for name in ("student", "teacher")]
    said: list[str] = []
    options: dict[str, Any] = {"rows": ROWS, "say": said.append, "warn": pytest.fail}
    found = evaluate_heads(names[:1], corpus, teacher=names[1], **options)
    models = [
        AutoModelForMaskedLM.from_pretrained(name, attn_implementation="eager").eval()
        for name in names
    ]
    rows = plain_sums(*models, corpus, [(0, 0), (1, 2)])
    expected = means(rows)
    assert said == [f"{sum(len(row['loss']) for row in rows)} masked tokens of {corpus}"]
    assert found[names[0]].keys() == expected.keys()
    draw = np.random.default_rng(0)
    drawn = [means([rows[i] for i in draw.integers(ROWS, size=ROWS)]) for _ in range(1000)]
    for name, figure in found[names[0]].items():
        low, high = np.percentile([one[name] for one in drawn if name in one], [2.5, 97.5])
        known = (expected[name], min(low, expected[name]), max(high, expected[name]))
        assert figure == pytest.approx(known, rel=1e-4, abs=1e-6), name
    # The teacher's own figures are those of the teacher measured as a model.
    alone = evaluate_heads(names[1:], corpus, **options)
    assert found[names[1]] == alone[names[1]] and found[GUESSING] == alone[GUESSING]


def test_layers_of_another_width_are_not_compared(tmp_path: Path, corpus: Path) -> None:
    save_teacher(tmp_path / "student", tiny_bert(2, seed=1))
    save_teacher(tmp_path / "teacher", tiny_bert(2, seed=2, hidden_size=64))
    student = str(tmp_path / "student")
    found = evaluate_heads(
        [student], corpus, teacher=str(tmp_path / "teacher"), rows=2, warn=pytest.fail
    )
    assert "kl" in found[student] and not [name for name in found[student] if "layer" in name]


def test_figures_of_a_model_that_diverged_are_infinite_or_nan() -> None:
    """Take a loss whose e to the loss fp64 cannot hold, and logits that are no numbers."""
    for size in (3000.0, math.nan):
        sums = HeadSums(2, np.zeros(3, np.int64))
        logits = size * torch.tensor([[1.0, 0.0, 0.0], [1.0, 0.0, 0.0]])
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            sums.add_logits(np.array([0, 1]), np.array([1, 2]), logits)
            found = sums.figures()
        assert str(found["loss"].value) == ("nan" if math.isnan(size) else "3000.0")
        assert str(found["perplexity"].value) == ("nan" if math.isnan(size) else "inf")
