"""Record the operators that torch calls."""

from typing import Any, NamedTuple

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class Call(NamedTuple):
    name: str  # as "aten.add.Tensor"
    args: tuple[Any, ...]
    result: Any

    def returns(self, shape: tuple[int, ...]) -> bool:
        return isinstance(self.result, Tensor) and self.result.shape == shape


class Operators(TorchDispatchMode):
    """Record calls while it is entered."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls.append(Call(str(func), args, func(*args, **(kwargs or {}))))
        return self.calls[-1].result

    @property
    def names(self) -> list[str]:
        return [call.name for call in self.calls]
