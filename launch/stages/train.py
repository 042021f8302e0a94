"""Train: the stage that an entry without `stage:` is."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from data_prep.disk.replacing import replace_json
from launch.commands import quiet
from launch.console import RUN_LOG, Training, show
from launch.stage_keys import TrainKeys
from launch.stages.estimate import assumed, compare_models, on_hardware, step_lines
from launch.stages.stage import How, Made, Stage, State, real
from pretrain.config import RunConfig, accumulation_steps
from pretrain.contracts.process import ExitCode
from pretrain.plan import plan
from pretrain.run_folder import check_hub, check_inputs, check_output, is_run, sealed_state


class Train(Stage):
    """Make or continue a run."""

    keys, of, everywhere = TrainKeys, RunConfig, True

    @property
    def title(self) -> str:
        """Return the objective."""
        return f"objective {self.config.objective.name}"

    def reads(self) -> dict[str, str]:
        """Return shards and models."""
        return {**self.config.sources(), "shards": str(self.config.shards)}

    def check(self, made: Made, how: How, *, dry_run: bool) -> tuple[Made, list[str]]:
        """Check folders, and the sizes of models by their config.json."""
        config = self.config
        check_output(config)
        needs_shards = not dry_run and real(config.shards) not in made
        check_inputs(config, list(made), needs_shards=needs_shards)
        if not dry_run:
            # Raises if the processes cannot share a batch.
            world = how.launch.world if how.launch is not None else 1
            accumulation_steps(on_hardware(config, how.launch), world)
        known, about = made, list[str]()
        unknown = made.get(real(config.shards)) is None
        if how.tokens and unknown and not (config.shards / "manifest.json").exists():
            known, about = assumed(config, how.tokens, made)
        found = plan(config, known, needs_shards=needs_shards)
        if not dry_run:
            check_hub(config, list(made))
        self.flop, self.disk = found.flop, found.disk
        lines = [*about, *found.lines]
        if dry_run:
            compare_models(config, made)
            more, self.least = step_lines(on_hardware(config, how.launch), found, how.launch)
            lines += more
        return {real(config.output): found.student}, lines

    def state(self) -> State:
        """Return whether the run has a checkpoint, and of its last step."""
        sealed = sealed_state(self.config.output)
        if sealed is None:
            begun = self.config.output.is_dir() and is_run(self.config.output)
            return "begun" if begun else "new"
        return "done" if sealed[1]["step"] == sealed[1]["num_steps"] else "begun"

    def result(self) -> str:
        """Return the last step and its validation figures."""
        if (sealed := sealed_state(self.config.output)) is None:
            return str(self.state())
        found, step = sealed[1]["evaluation"] or {}, sealed[1]["step"]
        figures = "".join(f", {k} {found[k]:.3f}" for k in ("loss", "accuracy") if k in found)
        if figures and (measured := sealed[1].get("evaluation_step", step)) != step:
            figures = f"; at step {measured:,}:{figures[1:]}"
        return f"step {sealed[1]['step']:,} of {sealed[1]['num_steps']:,}{figures}"

    def run(self, how: How) -> int:
        """Train in this process, or as `distil launch` does."""
        config = self.config
        if how.launch is not None:
            from launch.torchrun.start import start

            # JSON is YAML: the ranks read the run's config from there. Not from its output, which
            # is not locked yet and where the user's recipe may lie.
            with TemporaryDirectory(prefix="distil-recipe-") as folder:
                path = Path(folder) / f"{config.output.name}.json"
                replace_json(path, config.model_dump(mode="json"))
                return start(replace(how.launch, config=path, overrides=[]))
        # In this process: a second run needs no second import of torch.
        from pretrain.train import train

        quiet()
        with Training(config.output / RUN_LOG) as progress:
            outcome = train(config, progress=progress)
            place = f"step {outcome.step:,} of {outcome.num_steps:,}"
            progress.say(f"{config.output}: {outcome.ended}, {place}")
        if outcome.ended == "interrupted":
            show("the same command continues")
            return ExitCode.REQUEUE
        return ExitCode.DONE
