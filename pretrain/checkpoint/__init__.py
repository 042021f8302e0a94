"""Checkpoints: whole or not there. Safetensors and JSON only; nothing that executes on loading.

    checkpoints/step-00000500/
        student/               a Hugging Face folder that loads at any moment
        optimizer.safetensors  AdamW's moments, by parameter name
        state.json             step, configuration, data digest, teacher, fp16 scale
        manifest.json          size and sha256 of every file, itself hashed
    checkpoints/latest, best   names of the newest and of the lowest held-out loss: for people, and
                               for readers, who compare `latest` before and after a listing

Written in the background to a temporary folder, flushed, hashed, renamed; only then is an old one
removed. Whoever writes holds the lock of the run's folder.
"""

from pretrain.checkpoint.reading import Saved, check_optimizer, newest, read_newest, verify
from pretrain.checkpoint.writer import Writer

__all__ = ["Saved", "Writer", "check_optimizer", "newest", "read_newest", "verify"]
