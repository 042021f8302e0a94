"""Packed rows: every document as if it were alone."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import BertForMaskedLM, DistilBertForMaskedLM

from pretrain.attention import Segments, segments
from pretrain.batch import micro_batch
from pretrain.models import MaskedLM, last_hidden_state, projection

pytestmark = pytest.mark.usefixtures("one_thread")
CLS, PAD = 2, 0
Row = list[list[int]]


@pytest.fixture(params=["bert", "distilbert"])
def model(
    request: pytest.FixtureRequest,
    tiny_bert: Callable[..., BertForMaskedLM],
    tiny_distilbert: Callable[..., DistilBertForMaskedLM],
) -> Any:
    return tiny_bert() if request.param == "bert" else tiny_distilbert()


def packed(ids: Tensor) -> Segments:
    nothing = torch.zeros(len(ids), 0, dtype=torch.int64)
    batch = micro_batch(ids, nothing, nothing, cls_id=CLS, pad_id=PAD)
    return segments(ids, batch.cu_seqlens, pad_id=PAD)


def packed_outputs(model: MaskedLM, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Last hidden state [B, L, D] and logits [B, L, V] as training computes them."""
    with torch.no_grad():
        hidden = last_hidden_state(model, ids, packed(ids))
        logits = F.linear(*projection(model, hidden.flatten(0, 1)))
    return hidden, logits.unflatten(0, ids.shape)


def test_segments_by_hand() -> None:
    """Two documents and padding: 2 8 3 | 2 8 8 3 | 0 0."""
    ids = torch.tensor([[2, 8, 3, 2, 8, 8, 3, 0, 0]])
    found = packed(ids)
    assert found.token_mask.tolist() == [[True] * 7 + [False] * 2]
    assert found.position_ids.tolist() == [[0, 1, 2, 0, 1, 2, 3, 0, 1]]
    groups = "aaabbbbcc"
    expected = [[query == key for key in groups] for query in groups]
    assert found.attention_mask.shape == (1, 1, 9, 9)
    assert found.attention_mask[0, 0].tolist() == expected
    assert ids.tolist() == [[2, 8, 3, 2, 8, 8, 3, 0, 0]]


def test_segments_of_random_rows_against_a_loop() -> None:
    """A naive walk over each row; the batch holds full rows, padded rows and empty ones."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(5, 20, (40, 24), generator=generator)
    ids[torch.rand(40, 24, generator=generator) < 0.15] = CLS
    ids[:, 0] = CLS
    for row in range(40):
        ids[row, 24 - row % 25 :] = PAD
    found = packed(ids)
    for row in range(40):
        group, position, padded = -1, 0, False
        groups = []
        for i, token in enumerate(ids[row].tolist()):
            begins = token == CLS or (token == PAD and not padded)
            padded = token == PAD
            group, position = (group + 1, 0) if begins else (group, position + 1)
            groups.append(group)
            assert found.position_ids[row, i] == position
            assert found.token_mask[row, i] == (token != PAD)
        together = torch.tensor(groups)[:, None] == torch.tensor(groups)
        assert (found.attention_mask[row, 0] == together).all()


def test_a_packed_document_is_the_document_alone(
    model: Any, packed_ids: Tensor, documents: list[Row]
) -> None:
    """Alone through Transformers' own forward: no mask, no positions, no padding."""
    hidden, logits = packed_outputs(model, packed_ids)
    for row, row_documents in enumerate(documents):
        start = 0
        for document in row_documents:
            here = slice(start, start + len(document))
            with torch.no_grad():
                alone = model(input_ids=torch.tensor([document]), output_hidden_states=True)
            assert (hidden[row, here] - alone.hidden_states[-1][0]).abs().max() < 1e-5
            assert (logits[row, here] - alone.logits[0]).abs().max() < 1e-5
            start += len(document)
    assert torch.isfinite(hidden).all() and torch.isfinite(logits).all()  # padding, too


def test_documents_do_not_influence_one_another(
    model: Any, packed_ids: Tensor, documents: list[Row]
) -> None:
    """Another word in document 2 changes document 2 and not one bit of the others."""
    changed = packed_ids.clone()
    first, second = len(documents[0][0]), len(documents[0][1])
    changed[0, first + 3] = 5 + (changed[0, first + 3] - 4) % 195
    before, after = packed_outputs(model, packed_ids)[0], packed_outputs(model, changed)[0]
    same = (before == after).all(-1)
    here = slice(first, first + second)
    assert not same[0, here].any()
    same[0, here] = True
    assert same.all()


def test_the_comparison_can_fail(model: Any, packed_ids: Tensor, documents: list[Row]) -> None:
    """Without the mask, or without restarting positions, the second document comes out wrong."""
    packing = packed(packed_ids)
    first, second = len(documents[0][0]), len(documents[0][1])
    here = slice(first, first + second)
    right = packed_outputs(model, packed_ids)[0][0, here]
    counting = torch.arange(packed_ids.shape[1]).expand_as(packed_ids)
    for wrong in (
        packing._replace(attention_mask=torch.ones_like(packing.attention_mask)),
        packing._replace(position_ids=counting),
    ):
        with torch.no_grad():
            found = last_hidden_state(model, packed_ids, wrong)[0, here]
        assert (found - right).abs().max() > 1e-2
