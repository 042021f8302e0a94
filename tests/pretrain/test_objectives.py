"""Check what each objective tells a run: its terms for two sizes, its sentence, what it needs."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.runs import RECIPE, refused, start

from pretrain.contracts.terms import Shape, VocabularyTerm
from pretrain.objectives.distilbert import DistilBert
from pretrain.objectives.embedding import Embedding
from pretrain.objectives.minilm import MiniLM
from pretrain.objectives.mlm import MaskedLanguageModel
from pretrain.objectives.objective import Objective
from pretrain.objectives.tinybert import TinyBert

STUDENT, TEACHER = Shape(2, 32, 4), Shape(4, 32, 4)
NARROW = {"init": "random", "num_layers": 2, "hidden_size": 16, "num_attention_heads": 2}

Settings = Callable[..., dict[str, Any]]


@pytest.mark.parametrize(
    ("objective", "names", "compares"),
    [
        (DistilBert(), ["kl", "mlm", "cosine"], True),
        (DistilBert(kl=0), ["mlm", "cosine"], True),
        (DistilBert(mlm=0, cosine=0), ["kl"], True),
        (DistilBert(kl=0, mlm=0), ["cosine"], True),
        (DistilBert(kl=0, cosine=0), ["mlm"], False),
        (DistilBert(kl=0, mlm=0, cosine=0, mse=2), ["mse"], True),
        (DistilBert(kl=0, cosine=0, hidden_mse=1), ["mlm", "hidden_mse"], True),
        (MaskedLanguageModel(), ["mlm"], False),
        (MiniLM(relation_heads=8), ["queries", "keys", "values"], True),
        (Embedding(), ["cosine", "similarity"], True),
        (Embedding(cosine=0, mse=2, similarity=0), ["mse"], True),
        (TinyBert(), ["attention", "hidden", "embedding"], True),
        (TinyBert(attention=0, hidden=0.5), ["hidden", "embedding"], True),
    ],
    ids=str,
)
def test_properties_agree_with_the_terms(
    objective: Objective, names: list[str], compares: bool
) -> None:
    """Compare what is known before models are loaded with the terms themselves."""
    terms = objective.terms(STUDENT, TEACHER if objective.needs_teacher else None)
    assert [term.name for term in terms] == names
    assert objective.needs.compares == compares == any(term.needs_teacher for term in terms)
    assert objective.needs.logits == any(isinstance(term, VocabularyTerm) for term in terms)
    weighted = not isinstance(objective, MiniLM)  # whose three terms are one phrase
    assert objective.sentence.count(" x ") == weighted * len(terms)
    for term in terms:
        assert f"{term.weight(0):g} x " in objective.sentence or not weighted


def test_the_sentence_of_the_card() -> None:
    assert DistilBert(kl_positions="masked", cosine=0.5).sentence == (
        "5 x KL(teacher || student) at temperature 2 over masked tokens + 2 x cross-entropy of the "
        "masked tokens + 0.5 x cosine distance of the last hidden states"
    )
    assert MaskedLanguageModel().sentence == "1 x cross-entropy of the masked tokens"


def test_only_the_papers_own_values_are_called_published() -> None:
    assert "arXiv 1910.01108" in DistilBert().published
    assert DistilBert(kl=4).published == MaskedLanguageModel().published == ""


def test_cosine_needs_equal_widths() -> None:
    narrow = STUDENT._replace(hidden_size=16)
    with refused("objective.cosine 1", "the student has 16 and the teacher 32", "cosine: 0"):
        DistilBert().check(narrow, TEACHER)
    assert len(DistilBert(cosine=0).terms(narrow, TEACHER)) == 2


def test_a_narrow_student_is_refused_with_cosine(
    tmp_path: Path, teacher_folder: Path, run_config: Settings
) -> None:
    values = run_config(tmp_path / "run", teacher_folder, **RECIPE | {"student": NARROW})
    with refused("objective.cosine 1", "the student has 16 and the teacher 32"):
        start(values)
    assert not (tmp_path / "run" / "checkpoints").exists()
