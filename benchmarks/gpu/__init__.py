"""What `benchmarks/on_gpu.sh` measures, section by section; needs torch, transformers, accelerate.

`plan` lists every row before anything is measured, so that a run that was cut off leaves them all,
`supervise` runs the sections in a process that may hang or die, and the rest measure.
"""
