"""Read from torch's profiler what its allocator held."""

from collections.abc import Callable
from itertools import accumulate

from torch.profiler import ProfilerActivity, profile


def allocated_peak(work: Callable[[], object]) -> int:
    """Return the most bytes of `work` that were allocated on the CPU at the same time."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        work()
    assert profiler.profiler is not None
    events = profiler.profiler.kineto_results.events()
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    return max(accumulate(change for _, change in changes))
