"""Check activation checkpointing: identical gradients, in less memory."""

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from support import rank_work, ranks
from support.batches import drawn_batch, terms_of
from support.results import history, weights
from support.tiny import tiny_bert, tiny_distilbert
from torch import Tensor

from pretrain.config import RunConfig
from pretrain.contracts.batch import Batch
from pretrain.model.distillation import Distillation
from pretrain.model.families import MaskedLM
from pretrain.objectives.distilbert import DistilBert
from pretrain.objectives.mlm import MaskedLanguageModel
from pretrain.train import train

Make = Callable[..., Any]
Settings = Callable[..., dict[str, Any]]


@pytest.fixture
def batch(packed_ids: Tensor) -> Batch:
    return drawn_batch(packed_ids)


def with_dropout(model: MaskedLM) -> MaskedLM:
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.1
    return model.train()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("kind", ["distilbert", "bert"])
def test_gradients_are_the_same_bits_and_layers_keep_little(
    kind: str, precision: str, batch: Batch
) -> None:
    teacher = tiny_bert(seed=5).requires_grad_(False) if kind == "distilbert" else None
    terms = terms_of(DistilBert()) if teacher else terms_of(MaskedLanguageModel())

    def step(recomputes: bool) -> tuple[Tensor, list[Tensor], int]:
        student = with_dropout(tiny_distilbert(6) if teacher else tiny_bert(6))
        module = Distillation(student, teacher, terms, pad_id=0, recompute=recomputes)
        kept: dict[int, int] = {}

        def keep(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            kept[storage.data_ptr()] = storage.nbytes()
            return tensor

        parameters = {p.data_ptr() for p in student.parameters()}
        torch.manual_seed(7)
        autocast = torch.autocast("cpu", torch.bfloat16) if precision == "bf16" else nullcontext()
        with autocast, torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            loss, _ = module(batch, torch.ones(len(terms)))
        kept_bytes = sum(size for where, size in kept.items() if where not in parameters)
        torch.manual_seed(8)  # what was drawn in between is none of the backward pass's business
        loss.backward()
        gradients = [p.grad for p in student.parameters() if p.grad is not None]
        return loss.detach(), gradients, kept_bytes

    loss, gradients, kept = step(False)
    same, found, less = step(True)
    assert torch.equal(loss, same)
    assert len(gradients) == len(found) > 50
    assert all(torch.equal(one, other) for one, other in zip(gradients, found, strict=True))
    # Without: 6 layers of attention and feed-forward; with it: 6 inputs [3, 32, 32] and the head.
    assert less < 0.6 * kept


def test_dropout_is_on(batch: Batch) -> None:
    """Check that dropout is drawn, which the test above needs."""
    student = with_dropout(tiny_distilbert())
    module = Distillation(student, None, terms_of(MaskedLanguageModel()), pad_id=0)
    losses = {module(batch, torch.ones(1))[0].item() for _ in range(2)}
    assert len(losses) == 2


@pytest.fixture
def settings(teacher_folder: Path, make_settings: Settings) -> Settings:
    return make_settings(
        teacher_folder,
        student={"num_layers": 2},
        train={"max_steps": 4, "global_batch_size": 8, "micro_batch_size": 2},
        evaluation={"every": 2},
        checkpoint={"every": 2},
    )


def assert_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    ours, theirs = weights(one, 4), weights(other, 4)
    assert ours.keys() == theirs.keys() and history(one) == history(other)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_a_run_is_identical_and_may_switch_when_resumed(settings: Settings) -> None:
    usual, changed = settings("usual"), settings("changed", activation_checkpointing=True)
    train(RunConfig.model_validate(usual))
    train(RunConfig.model_validate(changed), stop_after=2)
    changed["train"]["activation_checkpointing"] = False
    train(RunConfig.model_validate(changed), stop_after=3)
    changed["train"]["activation_checkpointing"] = True
    train(RunConfig.model_validate(changed))
    assert_same(usual, changed)


def test_two_processes_train_the_same_with_it(settings: Settings) -> None:
    usual, less = settings("usual"), settings("less", activation_checkpointing=True)
    for values in (usual, less):
        ranks.run(2, rank_work.once, values)
    assert_same(usual, less)
