"""Define the terms on vocabulary logits: each formula, and the code that computes it.

The LM head (`kernels/head/vocabulary.py`) computes them in chunks of positions, without a tensor of
[positions, vocabulary], in one of two ways:

- If each of them names a formula in `fused`, and no two the same one, a backend computes values
  and gradients: `kernels/head/triton_kernel.py` on GPUs,
  `kernels/head/closed_form.py` elsewhere.
  They compute the formulas below, and `tests/pretrain/test_head*.py` compare each with fp64.
- Otherwise the functions below run with autograd, for all vocabulary terms: one term without
  `fused` is enough. The figures of an evaluation are such terms.

All functions compute in fp32 whatever the precision of their inputs (fp64 stays fp64): a bf16
softmax over 30,000 tokens is wrong in the second digit.

Shapes: N positions, V vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pretrain.contracts.terms import VocabularyTerm, constant, wide

if TYPE_CHECKING:
    from torch import Tensor


def kl_divergence(student_NV: Tensor, teacher_NV: Tensor, *, temperature: float) -> Tensor:
    """Compute T^2 * KL(softmax(teacher / T) || softmax(student / T)) [N].

    L_ce of DistilBERT (arXiv 1910.01108, section 2), after Hinton et al. 2015, section 2: T^2 keeps
    the gradient's size when the temperature T changes. The gradient is T (q - p), where p and q are
    the softmax of the teacher's and the student's logits at temperature T.
    """
    from torch.nn.functional import kl_div, log_softmax

    log_p = log_softmax(wide(teacher_NV) / temperature, dim=-1)
    log_q = log_softmax(wide(student_NV) / temperature, dim=-1)
    return kl_div(log_q, log_p, reduction="none", log_target=True).sum(-1) * temperature**2


def cross_entropy(logits_NV: Tensor, labels_N: Tensor) -> Tensor:
    """Compute -log softmax(logits)[label] [N], 0 where the label is -100.

    L_mlm of DistilBERT. The gradient is softmax(logits) - onehot(label).
    """
    from torch.nn import functional

    return functional.cross_entropy(wide(logits_NV), labels_N, reduction="none")


def kl_term(weight: float, *, temperature: float, over: str = "tokens") -> VocabularyTerm:
    """Return the KL term: student's and teacher's distributions over the vocabulary."""

    def values(student_NV: Tensor, teacher_NV: Tensor | None, labels_N: Tensor) -> Tensor:
        assert teacher_NV is not None
        return kl_divergence(student_NV, teacher_NV, temperature=temperature)

    return VocabularyTerm("kl", constant(weight), over, values, True, "kl", temperature)


def mlm_term(weight: float) -> VocabularyTerm:
    """Return the cross-entropy term of the masked tokens."""

    def values(student_NV: Tensor, teacher_NV: Tensor | None, labels_N: Tensor) -> Tensor:
        return cross_entropy(student_NV, labels_N)

    return VocabularyTerm("mlm", constant(weight), "masked", values, False, "cross_entropy")


def mse_term(weight: float, *, over: str) -> VocabularyTerm:
    """Return the squared distance of the logits, an option of DistilBERT's code; not fused."""

    def values(student_NV: Tensor, teacher_NV: Tensor | None, labels_N: Tensor) -> Tensor:
        assert teacher_NV is not None
        return (wide(student_NV) - wide(teacher_NV)).square().sum(-1)

    return VocabularyTerm("mse", constant(weight), over, values, True)
