"""Write a model that was made smaller beside the rest of its folder."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from huggingface_hub import ModelCard
from rich.filesize import decimal
from transformers import PreTrainedModel

from pretrain.export.export import write_modules
from pretrain.model.folder import write_model
from pretrain.monitor.figures import escaped


def write_smaller(
    folder: Path,
    model: PreTrainedModel,
    small: PreTrainedModel,
    *,
    tokenizer: Mapping[str, bytes],
    modules: Mapping[str, bytes],
    name: str,
    left: str,
    how: str,
    say: Callable[[str], None],
) -> None:
    """Write a folder as `write_model` does, with a card that says what was done.

    Args:
        folder: missing or empty.
        model, small: before and after.
        tokenizer: content of its files, by name.
        modules: of sentence-transformers, by path.
        name: of the model before.
        left: what is left, for instance "8,000 tokens".
        how: sentences of the card.
        say: receives the sizes.
    """

    def extra(place: Path) -> None:
        write_modules(place, modules)

    title = escaped(Path(name).name)
    card = ModelCard(
        f"---\nlibrary_name: transformers\n---\n\n# {title}, {left}\n\n"
        f"The weights are those of `{title}`. {how}\n"
    )
    write_model(small, folder, tensors={}, tokenizer=tokenizer, card=card, extra=extra)
    before, after = (4 * sum(p.numel() for p in m.parameters()) for m in (model, small))
    say(f"{left}, {decimal(before)} -> {decimal(after)} in fp32")
