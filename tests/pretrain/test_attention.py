"""Check that attention computes every document of a packed row as if it were alone."""

import copy
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.operators import Operators
from support.tiny import tiny_bert, tiny_distilbert
from torch import Tensor

from pretrain.contracts.packing import Packing, block_diagonal_mask, find_documents
from pretrain.model.families import MaskedLM, encode, family_of
from pretrain.tasks.mlm.examples import masked_batch

CLS, PAD = 2, 0
Row = list[list[int]]


@pytest.fixture(params=["bert", "distilbert"])
def model(request: pytest.FixtureRequest) -> Any:
    return tiny_bert() if request.param == "bert" else tiny_distilbert()


def packed(ids: Tensor) -> Packing:
    nothing = torch.zeros(len(ids), 0, dtype=torch.int64)
    batch = masked_batch(ids, nothing, nothing, cls_id=CLS, pad_id=PAD)
    return find_documents(ids, batch.cu_seqlens, batch.max_length, pad_id=PAD)


def packed_outputs(model: MaskedLM, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return last hidden states [B, L, D] and logits [B, L, V], computed as in training."""
    with torch.no_grad():
        hidden = encode(model, ids, packed(ids)).last_hidden_state
        logits = F.linear(*family_of(model).projection(model, hidden.flatten(0, 1)))
    return hidden, logits.unflatten(0, ids.shape)


def test_packing_by_hand() -> None:
    """Compute the packing of two documents and padding: 2 8 3 | 2 8 8 3 | 0 0."""
    ids = torch.tensor([[2, 8, 3, 2, 8, 8, 3, 0, 0]])
    found = packed(ids)
    assert found.token_mask.tolist() == [[True] * 7 + [False] * 2]
    assert found.position_ids.tolist() == [[0, 1, 2, 0, 1, 2, 3, 0, 1]]
    assert found.cu_seqlens.tolist() == [0, 3, 7, 9] and found.max_length == 4
    groups = "aaabbbbcc"
    expected = [[query == key for key in groups] for query in groups]
    mask = block_diagonal_mask(found.cu_seqlens, 1, 9)
    assert mask.shape == (1, 1, 9, 9) and mask[0, 0].tolist() == expected
    assert ids.tolist() == [[2, 8, 3, 2, 8, 8, 3, 0, 0]]


def test_packing_of_random_rows_against_a_loop() -> None:
    """Compare with a loop over each row, for full, padded and empty rows."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(5, 20, (40, 24), generator=generator)
    ids[torch.rand(40, 24, generator=generator) < 0.15] = CLS
    ids[:, 0] = CLS
    for row in range(40):
        ids[row, 24 - row % 25 :] = PAD
    found = packed(ids)
    mask, begins = block_diagonal_mask(found.cu_seqlens, 40, 24), []
    for row in range(40):
        group, position, padded = -1, 0, False
        groups = []
        for i, token in enumerate(ids[row].tolist()):
            begin = token == CLS or i == 0 or (token == PAD and not padded)
            padded = token == PAD
            group, position = (group + 1, 0) if begin else (group, position + 1)
            groups.append(group)
            begins += [24 * row + i] if begin else []
            assert found.position_ids[row, i] == position
            assert found.token_mask[row, i] == (token != PAD)
        together = torch.tensor(groups)[:, None] == torch.tensor(groups)
        assert (mask[row, 0] == together).all()
    bounds = [*begins, 40 * 24]
    assert found.cu_seqlens.dtype == torch.int32 and found.cu_seqlens.tolist() == bounds
    assert found.max_length == max(end - begin for begin, end in pairwise(bounds))


# Transformers' own forward pass


def test_the_walk_leaves_transformers_forward_as_it_is(model: Any, packed_ids: Tensor) -> None:
    """Compare without mask, with padding masks (one without padding) and with a 4-D mask."""
    other, ids = copy.deepcopy(model), packed_ids.clamp(min=1)
    encode(model, packed_ids, packed(packed_ids))
    padding = torch.ones_like(ids)
    padding[0, 20:] = padding[2, 5:] = 0
    four = torch.rand(3, 1, 32, 32, generator=torch.Generator().manual_seed(0)) < 0.5
    outputs = []
    for mask in (None, padding, torch.ones_like(ids), four):
        with torch.no_grad():
            ours, theirs = (m(input_ids=ids, attention_mask=mask).logits for m in (model, other))
        assert torch.equal(ours, theirs)
        outputs.append(ours)
    assert not torch.equal(outputs[0], outputs[1])  # the mask was heeded


def test_documents_stay_apart_whatever_attention_a_model_names(
    model: Any, packed_ids: Tensor
) -> None:
    expected = packed_outputs(model, packed_ids)
    model.set_attn_implementation("eager")
    assert model.config._attn_implementation == "eager"
    for ours, theirs in zip(packed_outputs(model, packed_ids), expected, strict=True):
        assert torch.equal(ours, theirs)


def test_a_saved_model_names_no_attention(model: Any, packed_ids: Tensor, tmp_path: Path) -> None:
    encode(model, packed_ids, packed(packed_ids))
    model.save_pretrained(tmp_path)
    assert "attn" not in (tmp_path / "config.json").read_text(encoding="utf-8")


def test_no_mask_and_no_sync_on_a_gpu(model: Any, packed_ids: Tensor) -> None:
    """Run on the meta device, which uses a GPU's kernels and refuses a read."""
    *tensors, longest = packed(packed_ids)
    packing = Packing(*(t.to("meta") for t in tensors), longest)
    on_meta, ids = model.to("meta").bfloat16().train(), packed_ids.to("meta")
    shape = (3, 1, 32, 32)  # of a mask
    with Operators() as called:
        encode(on_meta, ids, packing).last_hidden_state.sum().backward()
    assert not any(call.returns(shape) for call in called.calls)
    assert "aten._flash_attention_forward.default" in called.names
    assert "aten._flash_attention_backward.default" in called.names
    with torch.inference_mode(), Operators() as called:
        encode(on_meta.float().eval(), ids, packing)  # this kernel has no dropout
    assert not any(call.returns(shape) for call in called.calls)
    assert "aten._efficient_attention_forward.default" in called.names
    with Operators() as called:  # it sees one that is there
        block_diagonal_mask(packing.cu_seqlens, 3, 32)
    assert any(call.returns(shape) for call in called.calls)
