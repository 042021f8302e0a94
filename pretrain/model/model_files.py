"""Read the weights of a model without running any code.

`transformers` gets a config and tensors from here and never a folder: files in a folder can make it
load code (auto_map, attention kernels), pickles, adapters and other repositories. In every function
the message of a RunError begins with `who`.
"""

from __future__ import annotations

from pathlib import Path

import psutil
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers.modeling_utils import load_state_dict

from data_prep.messages import first_line
from pretrain import RunError
from pretrain.model.config_file import read_json

_SAFE, _PICKLED = "model.safetensors", "pytorch_model.bin"
_SAFE_UNPICKLER = (2, 10)  # torch 2.10: before, weights_only was not safe (CVE-2026-24747)


def read_tensors(who: str, folder: Path, *, pickled: bool = False) -> dict[str, Tensor]:
    """Return all weights of a folder by name, on the CPU, as copies.

    It reads safetensors, in one file or several; with `pickled` else a pytorch_model.bin.
    """
    files = _weight_files(who, folder, _SAFE)
    safe = bool(files)
    if not safe:
        files = _weight_files(who, folder, _PICKLED)
        if not files:
            raise RunError(f"{who}: there is no {folder / _SAFE}; check the path")
        if not pickled:
            raise RunError(
                f"{who}: {next(iter(files))} is a pickle, and there is no {_SAFE}; load the model "
                "where you "
                "trust it and write it again with save_pretrained"
            )
        if tuple(map(int, torch.__version__.split(".")[:2])) < _SAFE_UNPICKLER:
            raise RunError(
                f"{who}: {next(iter(files))} is a pickle, which torch {torch.__version__} does not "
                f"read safely (CVE-2026-24747); upgrade to torch 2.10, or save the model as {_SAFE}"
            )
    # Before anything is read: the system would kill the process without a message.
    size, memory = sum(file.stat().st_size for file in files), psutil.virtual_memory().total
    if size > memory:
        raise RunError(
            f"{who}: its weights have {size:,} bytes, more than the memory here ({memory:,}); take "
            "a smaller model, or a larger machine"
        )
    tensors: dict[str, Tensor] = {}
    for file, listed in sorted(files.items()):
        try:
            # Both readers map the file: without a copy, a later write to it changes the model.
            if safe:
                found = load_file(file)
            else:  # `weights_only` builds tensors and nothing else
                found = load_state_dict(file, map_location="cpu", weights_only=True)
                assert all(isinstance(tensor, Tensor) for tensor in found.values())
            found = {name: tensor.clone() for name, tensor in found.items()}
        except Exception as error:  # a damaged file can raise any class
            reason = first_line(error) if safe else "damaged, or not only tensors"
            raise RunError(
                f"{who}: {file} cannot be read ({reason}); copy or download it again"
            ) from error
        # The index decides: a tensor that another file also holds may be an older one.
        if listed is not None and (missing := sorted(listed - found.keys())):
            raise RunError(
                f"{who}: {file} lacks {missing[0]}, which the index lists there; copy or download "
                "the model again"
            )
        tensors |= {name: found[name] for name in (found if listed is None else listed)}
    return tensors


def _weight_files(who: str, folder: Path, name: str) -> dict[Path, set[str] | None]:
    """Return the files of the weights, and the names of the tensors to take from each.

    It is the file of this name with all its tensors (None), or the files of its index. All are in
    the folder.
    """
    if (folder / name).is_file():
        return {folder / name: None}
    index = folder / f"{name}.index.json"
    if not index.is_file():
        return {}
    table = read_json(who, index).get("weight_map")
    parts: dict[Path, set[str] | None] = {}
    for tensor, part in table.items() if isinstance(table, dict) else [("", "")]:
        # Case matters: transformers would read a file without the suffix .safetensors as a pickle.
        plain = isinstance(part, str) and Path(part).name == part
        if not plain or not part.endswith(Path(name).suffix):
            raise RunError(
                f"{who}: {index.name} lists {part!r}, which is not a *{Path(name).suffix} file of "
                "this folder; save the model again"
            )
        if not (folder / part).is_file():
            raise RunError(f"{who}: {folder / part}, which {index.name} lists, is not a file")
        names = parts.setdefault(folder / part, set())
        assert names is not None
        names.add(tensor)
    return parts
