"""Pool the hidden states of whole documents, and apply a teacher's modules to the result.

    vector = [Normalize] [Dense ...] Pooling(hidden states)

Shapes: R or B rows, L row length, K the most whole documents of a row, D width of a token, W of a
vector.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "torch.nn.modules.linear.Identity": lambda x: x,
    "torch.nn.modules.activation.Tanh": torch.tanh,
    "torch.nn.modules.activation.ReLU": F.relu,
    "torch.nn.modules.activation.GELU": F.gelu,
}


def pooled(
    hidden_BLD: Tensor, documents_BL: Tensor, lengths_BK: Tensor, first_BL: Tensor | None = None
) -> Tensor:
    """Return the mean over the tokens of each whole document [B, K, D], 0 at an unused place.

    Args:
        hidden_BLD: hidden states.
        documents_BL: place of each token's whole document in its row; -1: in none.
        lengths_BK: tokens of the document at each place.
        first_BL: which tokens are the first of a document: their hidden states are taken instead.
    """
    # A product with a matrix of weights has the same bits at every call; a scatter on a GPU has
    # not. It costs K / (12 D) of a layer.
    places_K = torch.arange(lengths_BK.shape[1], device=hidden_BLD.device)
    member_BKL = documents_BL[:, None] == places_K[:, None]
    wide = torch.float64 if hidden_BLD.dtype == torch.float64 else torch.float32
    if first_BL is not None:
        weights_BKL = (member_BKL & first_BL[:, None]).to(wide)
    else:
        weights_BKL = member_BKL.to(wide) / lengths_BK.clamp(min=1)[..., None]
    with torch.autocast(hidden_BLD.device.type, enabled=False):
        return weights_BKL @ hidden_BLD.to(wide)


class SentenceHead(nn.Module):
    """Hold the modules of a teacher's folder behind its encoder.

    Args:
        width: D.
        first: pool a document's first token, [CLS]; else the mean.
        dense: (weight, bias or None, activation's name) of each dense layer.
        normalised: divide a vector by its length.
        longest: tokens of a text that the folder wants to be read; None: as many as fit.
    """

    def __init__(
        self,
        width: int,
        *,
        first: bool = False,
        dense: Sequence[tuple[Tensor, Tensor | None, str]] = (),
        normalised: bool = False,
        longest: int | None = None,
    ) -> None:
        super().__init__()
        self.first, self.normalised, self.longest = first, normalised, longest
        self.dense, self.activations = nn.ModuleList(), [name for *_, name in dense]
        for weight, bias, _ in dense:
            layer = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None)
            layer.load_state_dict({"weight": weight} | ({} if bias is None else {"bias": bias}))
            self.dense.append(layer)
            width = len(weight)
        self.width = width  # W
        self.requires_grad_(False)

    def forward(
        self, hidden_BLD: Tensor, documents_BL: Tensor, lengths_BK: Tensor, positions_BL: Tensor
    ) -> Tensor:
        """Return the vectors of whole documents [B, K, W]; positions are those in documents."""
        # In fp32, whatever the precision of the encoder.
        first_BL = positions_BL == 0 if self.first else None
        vectors_BKW = pooled(hidden_BLD, documents_BL, lengths_BK, first_BL)
        with torch.autocast(hidden_BLD.device.type, enabled=False):
            for layer, name in zip(self.dense, self.activations, strict=True):
                vectors_BKW = ACTIVATIONS[name](layer(vectors_BKW))
        return F.normalize(vectors_BKW, dim=-1) if self.normalised else vectors_BKW

    @property
    def digest(self) -> str:
        """Return a hash of all that shapes a vector."""
        whole = hashlib.sha256(repr((self.first, self.normalised, self.activations)).encode())
        for name, tensor in self.state_dict().items():
            whole.update(name.encode() + tensor.float().cpu().numpy().tobytes())
        return whole.hexdigest()
