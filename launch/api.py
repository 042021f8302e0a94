"""Offer training to Python: `from pretrain import compress, distil, encode, MaskingCollator`.

`pretrain` imports this file only when one of these names is used, because torch takes seconds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from launch.compression import compress
from pretrain.config import RunConfig
from pretrain.contracts.batch import IGNORE
from pretrain.evaluation.encoders import encode
from pretrain.tasks.mlm.masking import Masking
from pretrain.tasks.mlm.words import borders
from pretrain.train import Outcome, train

__all__ = ["MaskingCollator", "Outcome", "compress", "distil", "encode"]


def distil(config: Mapping[str, Any] | Path | str, *overrides: str) -> Outcome:
    """Train a run, or continue where its last checkpoint left off, in this process.

    Args:
        config: a YAML file, `shipped:NAME.yaml`, or its content as a dictionary.
        overrides: `section.key=value`, as on the command line.

    Raises:
        RunError, CorpusError: a mistake in the config or its inputs; names the key and the fix.
    """
    # Only `launch` reads YAML and shows progress.
    from launch.commands import quiet
    from launch.config import load_config
    from launch.console import Training

    quiet()
    settings = load_config(
        RunConfig, Path(config) if isinstance(config, str) else config, overrides
    )
    with Training() as progress:
        return train(settings, progress=progress)


class MaskingCollator:
    """Pad and mask examples of token ids, 80/10/10, for `transformers.Trainer`.

    Masks are drawn again for every batch, from torch's generator, which `set_seed` and the workers
    of a DataLoader seed.

    Args:
        tokenizer: a fast tokenizer of transformers.
        probability: share of the ordinary tokens to predict.
        mode: single tokens, or whole words.

    Raises:
        ValueError: the tokenizer does not mark where words begin, or has no mask token.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        probability: float = 0.15,
        mode: Literal["uniform", "whole_word"] = "uniform",
    ) -> None:
        if mode not in ("uniform", "whole_word") or not 0 < probability < 1:
            raise ValueError("mode: uniform or whole_word; probability: a share, e.g. 0.15")
        if tokenizer.mask_token_id is None or tokenizer.pad_token_id is None:
            raise ValueError("the tokenizer has no mask or no padding token; set both")
        self.pad = tokenizer.pad_token_id
        marks = None
        if mode != "uniform":
            marks = borders(tokenizer.backend_tokenizer.to_str().encode())
        self.masking = Masking(
            probability,
            special_ids=tuple(sorted(set(tokenizer.all_special_ids))),
            mask_id=tokenizer.mask_token_id,
            vocab_size=len(tokenizer),
            seed=0,
            words=marks,
        )

    def __call__(self, examples: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        """Return input_ids, attention_mask and labels [B, L], -100 where nothing is predicted."""
        texts = [np.asarray(example["input_ids"], dtype=np.int64) for example in examples]
        ids = np.full((len(texts), max(map(len, texts))), self.pad, dtype=np.int64)
        for row, text in zip(ids, texts, strict=True):
            row[: len(text)] = text
        # A key for each row, drawn as torch's generator stands.
        keys = torch.randint(0, 2**32, (2, len(texts)), dtype=torch.int64).numpy()
        masked = self.masking(ids, keys[0], keys[1])
        labels = np.full_like(ids, IGNORE)
        # The slots of a row point at different positions, the unused ones with the label IGNORE.
        np.put_along_axis(labels, masked.positions, masked.labels, axis=1)
        lengths = np.array([len(text) for text in texts])[:, None]
        attention = (np.arange(ids.shape[1]) < lengths).astype(np.int64)
        found = (masked.input_ids, attention, labels)
        names = ("input_ids", "attention_mask", "labels")
        return {name: torch.from_numpy(values) for name, values in zip(names, found, strict=True)}
