"""Estimate the memory of a process of a run in closed form, before any weights are read.

Per token a layer of width D and inner width F keeps `d D + f F` bytes for its backward pass. The
constants are a fit to what torch's profiler and its counts by shapes found, of nine objectives in
four families; `tests/pretrain/test_plan_memory.py` compares with the profiler. On a GPU attention
is taken as flash attention, which keeps no pairs of tokens. Nothing here imports
torch, so a login node can answer for a GPU. `micro_batch_size: auto` tries real steps instead.
"""

from __future__ import annotations

from typing import NamedTuple

from pretrain.config import RunConfig
from pretrain.contracts.terms import Sizes
from pretrain.plan import Planned, parameters


class _Bytes(NamedTuple):
    """Hold bytes that a layer keeps of a token."""

    of_d: float
    of_f: float
    dropout: float = 0.0  # more of D, with dropout


# By family and precision; ModernBERT's feed-forward part is gated and has no dropout.
_KEPT = {
    ("modernbert", "fp32"): _Bytes(23, 32),
    ("modernbert", "half"): _Bytes(33, 10.5),
    ("others", "fp32"): _Bytes(32, 10, 4),
    ("others", "half"): _Bytes(25, 4, 6),
}
_INPUT = 2  # bytes of D: the input of a layer that is computed again
_MASKED = 14  # bytes of a pair of tokens in a head, in a local layer on a CPU
_ENDS = 22  # bytes of D: embeddings, and the backward pass's own tensors
_COMPARED = 25  # bytes of D, for each layer that is compared
_PAIR = 23  # bytes of a pair of tokens in a head; so many pairs at a time:
_MOST_PAIRS = {"cpu": 2**18, "cuda": 2**24}
# Of a logit, in chunks of so many positions, and of blocks of so many logits.
_LOGIT, _CHUNK, _BLOCK = 9, {"cpu": 512, "cuda": 2048}, {"cpu": 2**18, "cuda": 2**23}


class Footprint:
    """Estimate what a process of a run keeps in memory, within about a quarter, a third with
    long rows of a ModernBERT on a CPU.

    Gradients and AdamW's two moments are in fp32. Not counted: the head of a task, the inside of
    kernels, the allocator's rounding and what CUDA or Python take for themselves.

    Args:
        config: the run, with a precision.
        student, teacher: sizes of Transformers.
        rows: of the shards; those of a micro-batch are taken as full.
        device: "cpu" or "cuda"; this machine need not have it.
    """

    def __init__(
        self, config: RunConfig, student: Sizes, teacher: Sizes | None, rows: Planned, device: str
    ) -> None:
        objective, self.full = config.objective, config.train.precision == "fp32"
        self.config, self.sizes, self.rows, self.device = config, student, rows, device
        self.student = parameters(student, rows, head=objective.needs.logits)
        self.teacher = 0
        self.held = {"student": 4 * self.student}
        if teacher is not None and (objective.needs.compares or objective.needs.modules):
            self.teacher = parameters(teacher, rows, head=objective.needs.logits)
            in_fp32 = self.full or objective.needs.modules
            self.held["teacher"] = (4 if in_fp32 else 2) * self.teacher
        trained = self.student
        if objective.needs.modules:  # only layers are trained
            none = student._replace(num_hidden_layers=0)
            trained -= parameters(none, rows, head=objective.needs.logits)
        self.held |= {"gradients": 4 * trained, "AdamW": 8 * trained}

    def micro_step(self, num: int, *, held: bool) -> int:
        """Return the peak bytes of a micro-step of `num` rows above `self.held`.

        With `held` gradients lie there already: of an earlier micro-batch, or in buckets of DDP.
        Else they take the place of activations as these are freed.
        """
        peak = self._activations(num * self.rows.row_length)
        # At the end of a backward pass the embeddings have new gradients before these are added.
        words = 4.0 * self.rows.vocab_size * self.sizes.hidden_size
        new = 3 if self.config.objective.needs.logits else 1
        if held:
            return round(max(peak, new * words))
        return round(max(0.0, peak - self.held["gradients"], (new - 1) * words))

    def _activations(self, tokens: int) -> float:
        width, layers = self.sizes.hidden_size, self.sizes.num_hidden_layers
        family = "modernbert" if self.sizes.family == "modernbert" else "others"
        kept = _KEPT[family, "fp32" if self.full else "half"]
        own, on_cpu = self.config.model or self.config.student, self.device == "cpu"
        rates = own.model_dump(include={"dropout", "hidden_dropout_prob"}).values()
        dropout = kept.dropout if any(rates) else 0.0
        pairs = tokens * self.rows.row_length * self.sizes.num_attention_heads
        scores = work = 0.0
        if on_cpu and family == "modernbert":
            work = (_MASKED if layers > 1 else _MASKED / 4) * pairs  # layer 0 is global
        elif on_cpu and (any(rates) or not self.full):
            scores = (4 if self.full else 2) * pairs  # probabilities, as the matrix products give
        layer = tokens * ((kept.of_d + dropout) * width + kept.of_f * self.sizes.intermediate_size)
        layer += scores
        work += self._compared(tokens) + self._logits(tokens)
        if self.config.train.activation_checkpointing:
            kept_layers, work = float(tokens * layers * _INPUT * width), max(work, layer)
        else:
            kept_layers = layers * layer
        return kept_layers + tokens * _ENDS * width + work

    def _logits(self, tokens: int) -> float:
        """Return the bytes of an LM head's chunk."""
        logits = [part for part in self.config.objective.parts if "logits" in part.reads]
        if not logits:
            return 0.0
        everywhere = any(part.over == "tokens" for part in logits)
        share = 1.0 if everywhere else max(end or 0.0 for end in self.config.masking.ends)
        num, words = share * tokens, self.rows.vocab_size
        chunk = min(_CHUNK[self.device], num) * words
        return _LOGIT * (chunk + min(_BLOCK[self.device], num * words))

    def _compared(self, tokens: int) -> float:
        """Return the bytes of layers that are compared by pairs of tokens."""
        objective, sizes = self.config.objective, self.sizes
        of_tokens = any(part.over == "tokens" for part in objective.parts)
        if objective.needs.logits or self.config.task.has_head or not of_tokens:
            return 0.0
        heads = objective.relation_heads_of(sizes.num_attention_heads)
        pairs = min(_MOST_PAIRS[self.device], tokens * self.rows.row_length * heads)
        layers = sizes.num_hidden_layers if objective.needs.sums else 1
        return _PAIR * pairs + _COMPARED * layers * tokens * sizes.hidden_size
