"""Write and read checkpoints: each is whole or absent, and loading one executes nothing.

    checkpoints/step-00000500/
        student/               a Hugging Face folder that loads at any moment
        adapters.safetensors   what the objective trains with the student, if anything
        optimizer.safetensors  AdamW's state, by parameter name
        state.json             step, configuration, data digest, teacher, fp16 scale
        manifest.json          size and sha256 of every file, and its own hash
    checkpoints/latest, best   names of the newest one and of the one with the lowest validation
                               loss: for people, and for readers, who compare `latest` before and
                               after a listing

A thread writes to a temporary folder, flushes, hashes and renames it. Only then is an old one
removed. The writer holds the lock of the run's folder.
"""

from pretrain.checkpoint.background import Writer
from pretrain.checkpoint.reading import (
    Saved,
    check_optimizer,
    load_adapters,
    newest,
    read_newest,
    verify,
)

__all__ = ["Saved", "Writer", "check_optimizer", "load_adapters", "newest", "read_newest", "verify"]
