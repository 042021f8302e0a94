"""Export: write a run's student as a folder for transformers or sentence-transformers."""

from __future__ import annotations

from data_prep.messages import warn
from launch.commands import quiet
from launch.console import show
from launch.recipe_config import ExportKeys
from launch.stages.stage import How, Made, Stage, State, real
from pretrain.exit_codes import ExitCode
from pretrain.export.arguments import check_target
from pretrain.plan import Sizes
from pretrain.run_folder import check_run


class Export(Stage):
    """Write the newest checkpoint; an export with the same files is left as it is."""

    keys = ExportKeys

    @property
    def title(self) -> str:
        """Return which run it is of."""
        return f"export of {self.config.run}"

    def reads(self) -> dict[str, str]:
        """Return the run."""
        return {"run": str(self.config.run)}

    def check(self, made: Made, how: How, *, dry_run: bool) -> tuple[Sizes | None, list[str]]:
        """Check the run and the target."""
        run = real(self.config.run)
        if run not in made and not dry_run:
            check_run(self.config.run)
        check_target(self.config.run, self.config.output, again=True)
        return made.get(run), [f"from: {self.config.run}"]

    def state(self) -> State:
        """Return whether something is there: an export is complete or absent."""
        output = self.config.output
        return "done" if output.is_dir() and any(output.iterdir()) else "new"

    def run(self, how: How) -> int:
        """Export, and compare with what is there."""
        from pretrain.export.export import export

        quiet()
        before = self.state()
        exported = export(self.config.run, self.config.output, warn, again=True)
        show(
            f"{self.config.output}: {exported.architecture}, {exported.num_parameters:,} "
            f"parameters, from step {exported.step:,}" + ", up to date" * (before == "done")
        )
        return ExitCode.DONE
