"""Build a masked language model of a known family from files that are not trusted."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers.utils import logging

from data_prep.messages import first_line, one_line, warn
from data_prep.shards import Manifest
from pretrain import RunError
from pretrain.model.families import FAMILIES, Family

FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
_LABELS = ("id2label", "label2id", "num_labels", "_num_labels")
# Models of which a class ...ForMaskedLM exists, but which were trained to do something else.
_NO_LM_HEAD = {
    "electra": "an electra detects replaced tokens; its masked-language-model head is untrained",
    "deberta-v2": "a deberta-v2 detects replaced tokens (DeBERTa-v3), and has no trained head",
}
# Settings of config.json: the values that `walk` implements (None: the key is missing), and what it
# assumes.
_ENCODER: dict[str, tuple[tuple[Any, ...], str]] = {
    "is_decoder": ((None, False), "only bidirectional encoders are supported"),
    "add_cross_attention": ((None, False), "an encoder reads no other model's output"),
    "tie_word_embeddings": ((None, True), "an LM head has the embeddings' weights here"),
    "position_embedding_type": ((None, "absolute"), "positions are absolute here"),
}
_EPSILONS = ("layer_norm_eps", "norm_eps")
# Tensors of a usual file that no encoder of ours has: for next-sentence prediction, and constants.
_UNUSED = re.compile(r"(.*\.)?(pooler\..*|seq_relationship\..*|position_ids|token_type_ids)")
_UNTRAINED = 2**20  # parameters that tiny weights may lack: an error below names the missing ones


def known_family(who: str, raw: Mapping[str, Any]) -> Family:
    """Return the family of a config.json.

    Raises:
        RunError: it is none that is known here, or its model is not what the walk would compute;
            the message begins with `who`.
    """
    kind = raw.get("model_type", "bert")  # old configs of BERT name none
    if not isinstance(kind, str) or kind not in FAMILIES:
        if isinstance(kind, str) and kind in _NO_LM_HEAD:
            raise RunError(f"{who}: {_NO_LM_HEAD[kind]}; take a model that predicts masked words")
        raise RunError(
            f"{who}: a {one_line(str(kind), 60)}; supported are {', '.join(FAMILIES)}, with a "
            "masked-language-model head (another family needs a file in pretrain/model/families/ "
            "that names its parts, see docs/ARCHITECTURE.md)"
        )
    family = FAMILIES[kind]
    for key, (usable, assumed) in _ENCODER.items():
        if (value := raw.get(key)) not in usable:
            raise RunError(f"{who}: its {key} is {str(value).lower()}, but {assumed}")
    # No tensor tells the number of heads, so a default of transformers might be a wrong one.
    key = family.own_names.get("num_attention_heads", "num_attention_heads")
    if not {key, "num_attention_heads"} & raw.keys():
        raise RunError(f"{who}: config.json lacks {key}; add it, or save the model again")
    for key in _EPSILONS:
        value = raw.get(key, 1.0)
        if not isinstance(value, float | int) or not 0 < value < math.inf:
            raise RunError(
                f"{who}: its {key} is {one_line(str(value), 60)}, which must be a positive number; "
                "correct config.json, or copy the model again"
            )
    return family


@contextmanager
def silent_transformers() -> Iterator[None]:
    """Hide what transformers prints while it loads: `assemble` judges the missing tensors."""
    verbosity, shows_progress = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if shows_progress:
            logging.enable_progress_bar()


def assemble(
    who: str,
    family: Family,
    raw: dict[str, Any],
    tensors: dict[str, Tensor],
    *,
    needs_head: bool = True,
    of_task: bool = False,
) -> tuple[Any, bool]:
    """Build a model of a family from its config.json and all its weights, in fp32.

    With `of_task` the caller reads the weights of a task's head, and nothing is said about them.

    Returns:
        The model, and whether its MLM head is trained. One that is not is the same at every call.

    Raises:
        RunError: they do not give a whole encoder, or with `needs_head` no trained MLM head; the
            message begins with `who`.
    """
    for prefix in ("_orig_mod.", "module."):
        if wrapped := next((name for name in tensors if name.startswith(prefix)), None):
            raise RunError(
                f"{who}: its weights are those of a wrapped model ({wrapped}): save the model "
                f"inside, or remove {prefix!r} from the names"
            )
    for name, tensor in tensors.items():
        # Casting quantised weights without their scale would change the model.
        if tensor.dtype not in FLOATS and not name.endswith("position_ids"):
            raise RunError(
                f"{who}: {name} holds {tensor.dtype}; save the model in fp32, fp16 or bf16"
            )
    try:
        # A classifier's labels are not part of a language model, and there may be very many.
        values = {key: value for key, value in raw.items() if key not in _LABELS}
        settings = family.completed(family.config.from_dict(values))
        # Refuse a config that describes far more than its weights hold, before that is allocated.
        key = settings.attribute_map.get("num_hidden_layers", "num_hidden_layers")
        num_layers = settings.num_hidden_layers
        if num_layers > len(tensors):
            raise RunError(
                f"{who}: its weights do not fit its config.json: {key} is {num_layers} there, and "
                f"the weights have {len(tensors)} tensors"
            )
        family.row_length(settings)  # raises if the positions cannot be counted
        with torch.device("meta"):
            described = sum(p.numel() for p in family.architecture(settings).parameters())
        held = sum(tensor.numel() for tensor in tensors.values())
        if described > 2 * held + _UNTRAINED:  # old files lack a tied matrix
            raise RunError(
                f"{who}: its weights do not fit its config.json: config.json describes "
                f"{described:,} parameters, the weights hold {held:,}"
            )
        with silent_transformers():
            model, report = family.architecture.from_pretrained(
                None,
                config=settings,
                state_dict=tensors,
                dtype=torch.float32,
                ignore_mismatched_sizes=True,
                output_loading_info=True,
            )
    except RunError:
        raise
    except Exception as error:  # a damaged config can raise any class
        raise RunError(f"{who}: config.json cannot be used ({first_line(error)})") from error
    for name, found, wanted in sorted(report["mismatched_keys"]):
        raise RunError(
            f"{who}: its weights do not fit its config.json: {name} is {list(found)} there, "
            f"{list(wanted)} by config.json"
        )
    model.config.return_dict = True
    # Old files lack the decoder: it is tied to the embeddings, and its bias to `predictions.bias`.
    missing = sorted(key for key in report["missing_keys"] if ".decoder." not in key)
    headless = [key for key in missing if key.startswith(family.head)]
    if headless and needs_head:
        raise RunError(
            f"{who}: it has no trained masked-language-model head ({headless[0]} is not in its "
            f"weights); take one that was saved as {family.architecture.__name__}, or continue "
            "this one first with objective mlm and model.init, which gives it a head. Objectives "
            "minilm, tinybert and embedding take a teacher as it is"
        )
    missing = [key for key in missing if key not in headless]
    # A tensor of the encoder that the walk does not have, such as a layer beyond the number in
    # config.json, would change its output. The head of a task does not.
    unused = sorted(key for key in report["unexpected_keys"] if not _UNUSED.fullmatch(key))
    prefix = f"{model.base_model_prefix}."
    is_body = not any(key.startswith(prefix) for key in tensors)
    if odd := [*missing, *(key for key in unused if is_body or key.startswith(prefix))]:
        raise RunError(f"{who}: its weights do not fit its config.json (see {odd[0]})")
    if unused and not of_task:
        others = f" and {len(unused) - 1} more" if len(unused) > 1 else ""
        warn(f"{who}: {unused[0]}{others} of its weights are not used: not part of a masked LM")
    # Transformers has drawn it from the global stream; the same bits at every start are needed.
    if headless:
        reinitialise(model, 0, only=family.head)
    _tie(who, model)
    return model, not headless


def _tie(who: str, model: Any) -> None:
    """Make the LM head's matrix that of the word embeddings; RunError if they differ."""
    # Transformers keeps both if a file has two different ones.
    embeddings, head = model.get_input_embeddings().weight, model.get_output_embeddings()
    if head.weight is not embeddings:
        if not torch.equal(head.weight, embeddings):
            raise RunError(
                f"{who}: its LM head and its embeddings differ; only tied models are supported"
            )
        head.weight = embeddings
    # Old files name the bias twice, too: of the decoder, and of the head.
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for name, bias in parameters.items():
        other = parameters.get(name.removesuffix("decoder.bias") + "bias")
        if name.endswith("decoder.bias") and other is not None and other is not bias:
            if not torch.equal(bias, other):
                raise RunError(
                    f"{who}: its LM head has two biases, and {name} is not the other; take a model "
                    "whose file holds one, or two that are equal"
                )
            head.bias = other


@torch.no_grad()
def reinitialise(model: nn.Module, seed: int, only: tuple[str, ...] = ("",)) -> None:
    """Initialise as BERT does: normal 0.02, biases 0, LayerNorm weights 1.

    Args:
        model: tied weights count under their first name.
        seed: of the random numbers.
        only: how all names of a parameter begin. Tied word embeddings also have a name outside the
            head, so drawing a new head leaves them as they are.
    """
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    # With a generator of its own, and parameters in name order, no other random number changes a
    # run's first weights.
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in sorted(model.named_parameters()):
        if not all(name.startswith(only) for name in names[parameter]):
            continue
        if parameter.dim() > 1:
            parameter.normal_(0.0, 0.02, generator=generator)
        else:
            parameter.fill_(1.0 if name.lower().endswith("norm.weight") else 0.0)


class TooFewPositions(RunError):
    """Report that rows are longer than a model's positions."""


def check_row_length(who: str, config: Any, manifest: Manifest) -> None:
    """Refuse rows that are longer than a model's positions."""
    try:
        longest = FAMILIES[config.model_type].row_length(config)
    except ValueError as error:
        raise RunError(f"{who}: its sizes cannot be used ({first_line(error)})") from None
    if manifest.row_length > longest:
        raise TooFewPositions(
            f"{who}: rows of {manifest.row_length} tokens need as many positions, but it has "
            f"{longest} (max_position_embeddings is {config.max_position_embeddings}); prepare the "
            f"corpus with row_length: {longest}"
        )
