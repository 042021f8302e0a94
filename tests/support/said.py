"""Record what a run says."""

from pretrain.monitor.metrics import Silent


class Said(Silent):
    """Record the lines of a run."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, text: str) -> None:
        self.lines.append(text)

    @property
    def precision(self) -> list[str]:
        return [line for line in self.lines if line.startswith("precision auto: ")]
