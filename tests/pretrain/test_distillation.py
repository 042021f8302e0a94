"""Compare the objective on packed rows with documents alone, full logits, autograd, fp64.

The reference runs every document through Transformers' own forward, without packing, padding or
masks, and computes the means of the paper.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from support.batches import drawn_batch, mean_coefficients, terms_of
from support.tiny import tiny_bert, tiny_distilbert
from torch import Tensor
from transformers import BertForMaskedLM, DistilBertForMaskedLM

from pretrain.contracts.batch import Batch
from pretrain.kernels.head import vocabulary
from pretrain.model.distillation import Distillation
from pretrain.objectives.distilbert import DistilBert

CLS, PAD = 2, 0
Row = list[list[int]]
Make = Callable[..., Any]
Models = tuple[DistilBertForMaskedLM, BertForMaskedLM]


class Expected(NamedTuple):
    means: dict[str, Tensor]
    loss: Tensor
    gradients: dict[str, Tensor]


@pytest.fixture(scope="module")
def batch(packed_ids: Tensor) -> Batch:
    found = drawn_batch(packed_ids)
    assert (found.labels["masked"] == -100).any() and (found.input_ids != packed_ids).any()
    assert found.counts["tokens"] == int((packed_ids != PAD).sum())
    assert found.counts["masked"] == int((found.labels["masked"] >= 0).sum())
    lengths = [
        len(text.split())
        for row in packed_ids.tolist()
        for text in " ".join(
            "" if i == PAD else f", {i}" if i == CLS else str(i) for i in row
        ).split(",")
        if text.strip()
    ]
    assert found.counts["sequences"] == len(lengths)
    assert found.counts["pairs"] == sum(length**2 for length in lengths)
    return found


@pytest.fixture
def models() -> Models:
    teacher = tiny_bert().requires_grad_(False)
    return tiny_distilbert().double(), teacher.double()


def module(models: Sequence[Any], objective: DistilBert) -> Distillation:
    student, teacher = models
    return Distillation(student, teacher, terms_of(objective), pad_id=PAD)


def step(distillation: Distillation, batch: Batch) -> tuple[Tensor, Tensor]:
    """Return the weighted sum of means and the terms' sums."""
    return distillation(batch, mean_coefficients(distillation.terms, batch, dtype=torch.float64))


def expected(
    models: Sequence[Any], batch: Batch, documents: Sequence[Row], objective: DistilBert
) -> Expected:
    """Compute means over all tokens or masked ones, document by document."""
    student, teacher = models
    t = objective.temperature
    labels = torch.full_like(batch.input_ids, -100).scatter(1, *batch.labels.values())
    kl_all, kl_masked, mlm, cosine = [], [], [], []
    mse_all, mse_masked, hidden = [], [], []
    for row, row_documents in enumerate(documents):
        start = 0
        for document in row_documents:
            here = slice(start, start + len(document))
            start += len(document)
            ids = batch.input_ids[None, row, here]
            ours = student(input_ids=ids, output_hidden_states=True)
            theirs = teacher(input_ids=ids, output_hidden_states=True)
            log_q = (ours.logits[0] / t).log_softmax(-1)
            p = (theirs.logits[0] / t).softmax(-1)
            kl = (p * (p.log() - log_q)).sum(-1) * t**2
            s, h = ours.hidden_states[-1][0], theirs.hidden_states[-1][0]
            predicted = (labels[row, here] >= 0).nonzero()[:, 0]
            logits = ours.logits[0, predicted]
            of_label = logits[torch.arange(len(predicted)), labels[row, here][predicted]]
            kl_all.append(kl)
            kl_masked.append(kl[predicted])
            squares = ((ours.logits[0] - theirs.logits[0]) ** 2).sum(-1)
            mse_all.append(squares)
            mse_masked.append(squares[predicted])
            hidden.append(((s - h) ** 2).sum(-1) / s.shape[-1])
            mlm.append(logits.logsumexp(-1) - of_label)
            cosine.append(1 - (s * h).sum(-1) / (s.norm(dim=-1) * h.norm(dim=-1)))
    kl_values = kl_all if objective.kl_positions == "all" else kl_masked
    values = {"kl": torch.cat(kl_values), "mlm": torch.cat(mlm), "cosine": torch.cat(cosine)}
    values["mse"] = torch.cat(mse_all if objective.kl_positions == "all" else mse_masked)
    values["hidden_mse"] = torch.cat(hidden)
    assert (len(values["cosine"]), len(values["mlm"])) == (
        batch.counts["tokens"],
        batch.counts["masked"],
    )
    means = {name: value.mean() for name, value in values.items()}
    terms = [weight * means[name] for name, weight in weights(objective).items()]
    loss = torch.stack(terms).sum()
    names, parameters = zip(*student.named_parameters(), strict=True)
    found = torch.autograd.grad(loss, parameters, allow_unused=True, materialize_grads=True)
    gradients = dict(zip(names, found, strict=True))
    return Expected({k: v.detach() for k, v in means.items()}, loss.detach(), gradients)


def weights(objective: DistilBert) -> dict[str, float]:
    names = ("kl", "mlm", "cosine", "mse", "hidden_mse")
    return {name: getattr(objective, name) for name in names}


def check_gradients(
    student: DistilBertForMaskedLM, expected: dict[str, Tensor], tolerance: float
) -> None:
    """Compare relative to each parameter's largest entry, or to all where that is 0."""
    largest = max(float(gradient.abs().max()) for gradient in expected.values())
    assert largest > 0.1
    for name, parameter in student.named_parameters():
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        scale = float(expected[name].abs().max())
        # A bias of the keys shifts every score of a query alike: softmax does not see it.
        if name.endswith("k_lin.bias") or scale == 0:
            scale = largest
        difference = float((gradient.double() - expected[name]).abs().max())
        assert difference <= tolerance * scale, f"{name}: {difference} of {scale}"


OBJECTIVES = {
    "triple": {},
    "masked kl": {"kl_positions": "masked"},
    "no kl": {"kl": 0},
    "no mlm": {"mlm": 0},
    "no cosine": {"cosine": 0},
    "no mlm, masked kl": {"mlm": 0, "kl_positions": "masked"},
    "kl alone": {"mlm": 0, "cosine": 0},
    "mlm alone": {"kl": 0, "cosine": 0},
    "cosine alone": {"kl": 0, "mlm": 0},
    "temperature 1": {"temperature": 1.0},
    "mse": {"mse": 0.5},
    "masked mse without kl": {"kl": 0, "mse": 0.5, "kl_positions": "masked"},
    "hidden mse": {"cosine": 0, "hidden_mse": 3.0},
    "hidden mse alone": {"kl": 0, "mlm": 0, "cosine": 0, "hidden_mse": 1.0},
}


@pytest.mark.parametrize("changes", OBJECTIVES.values(), ids=OBJECTIVES)
def test_loss_terms_and_gradients(
    changes: dict[str, Any],
    models: Models,
    batch: Batch,
    documents: list[Row],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(vocabulary.CHUNK, "cpu", 7)
    objective = DistilBert(**changes)
    reference = expected(models, batch, documents, objective)
    distillation = module(models, objective)
    kept = {name for name, weight in weights(objective).items() if weight}
    assert {term.name for term in distillation.terms} == kept

    loss, sums = step(distillation, batch)
    loss.backward()
    assert loss.item() == pytest.approx(reference.loss.item(), rel=1e-6)
    assert not sums.requires_grad
    for term, total in zip(distillation.terms, sums.tolist(), strict=True):
        count = batch.counts[term.over]
        assert total / count == pytest.approx(reference.means[term.name].item(), rel=1e-6)
    check_gradients(models[0], reference.gradients, 1e-6)


def test_the_weights_of_the_paper() -> None:
    objective = DistilBert()
    assert (objective.kl, objective.mlm, objective.cosine) == (5, 2, 1)
    assert (objective.temperature, objective.kl_positions) == (2, "all")


def test_the_tied_embedding_gets_both_gradients(
    models: Models, batch: Batch, documents: list[Row]
) -> None:
    """Check words absent from the input, which the head alone reaches, and words in it."""
    student, _ = models
    embedding = student.distilbert.embeddings.word_embeddings.weight
    assert student.vocab_projector.weight is embedding
    reference = expected(models, batch, documents, DistilBert()).gradients
    step(module(models, DistilBert()), batch)[0].backward()
    gradient, exact = embedding.grad, reference["distilbert.embeddings.word_embeddings.weight"]
    present = set(batch.input_ids.flatten().tolist())
    absent = [i for i in range(200) if i not in present]
    assert gradient is not None and len(absent) > 50
    for word in (absent[0], PAD, CLS, int(batch.input_ids[0, 1])):
        assert exact[word].abs().max() > 1e-6
        torch.testing.assert_close(gradient[word], exact[word], rtol=1e-9, atol=1e-12)


def test_fp32_and_autocast_are_close_to_fp64(batch: Batch, documents: list[Row]) -> None:
    """Compare fp32 to 1e-4 of a gradient; bf16 autocast to 2e-2 of the loss, 10 % of the norm."""
    exact = (tiny_distilbert().double(), tiny_bert().requires_grad_(False).double())
    reference = expected(exact, batch, documents, DistilBert())
    models = (tiny_distilbert(), tiny_bert().requires_grad_(False))
    distillation = module(models, DistilBert())
    factors = mean_coefficients(distillation.terms, batch)
    loss, _ = distillation(batch, factors)
    loss.backward()
    assert loss.item() == pytest.approx(reference.loss.item(), rel=1e-5)
    check_gradients(models[0], reference.gradients, 1e-4)

    models[0].zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        loss, _ = distillation(batch, factors)
    loss.backward()
    assert loss.item() == pytest.approx(reference.loss.item(), rel=2e-2)
    found = torch.cat([p.grad.flatten() for p in models[0].parameters() if p.grad is not None])
    true = torch.cat([gradient.flatten() for gradient in reference.gradients.values()])
    assert (found - true).norm() < 0.1 * true.norm()


def test_no_gradient_under_no_grad(models: Models, batch: Batch) -> None:
    distillation = module(models, DistilBert())
    with torch.no_grad():
        silent, sums = step(distillation, batch)
    loss, same = step(distillation, batch)
    assert loss.requires_grad and not silent.requires_grad
    assert silent.item() == pytest.approx(loss.item(), rel=1e-12)
    np.testing.assert_allclose(sums, same, rtol=1e-12)


def test_the_teacher_is_no_part_of_the_module(models: Models, batch: Batch) -> None:
    student, teacher = models
    before = {name: tensor.clone() for name, tensor in teacher.state_dict().items()}
    distillation = module(models, DistilBert())
    assert [*distillation.parameters()] == [*student.parameters()]
    assert all(name.startswith("student.") for name in distillation.state_dict())
    distillation.train()
    assert not teacher.training
    step(distillation, batch)[0].backward()
    assert all(parameter.grad is None for parameter in teacher.parameters())
    assert all((before[name] == tensor).all() for name, tensor in teacher.state_dict().items())


@pytest.mark.parametrize(
    ("weights", "runs"),
    [({"kl": 0.0, "cosine": 0.0}, False), ({"kl": 0.0}, True), ({"cosine": 0.0}, True)],
    ids=["mlm", "mlm+cosine", "kl+mlm"],
)
def test_the_teacher_runs_only_where_a_term_needs_it(
    weights: dict[str, float], runs: bool, models: Sequence[Any], batch: Batch
) -> None:
    calls = []
    for part in models[1].modules():
        part.register_forward_pre_hook(lambda *inputs: calls.append(inputs))
    loss, _ = step(module(models, DistilBert.model_validate(weights)), batch)
    assert bool(calls) == runs
    loss.backward()
