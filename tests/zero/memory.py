"""How much memory tensors take while a function runs: what torch's CPU allocator hands out, from its profiler."""

from collections.abc import Callable

from torch.profiler import ProfilerActivity, profile


def peak_bytes(function: Callable[[], object]) -> int:
    """Highest sum of what ``function`` allocated and did not yet give back."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        function()
    assert profiler.profiler is not None
    events = profiler.profiler.kineto_results.events()
    changes = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
    assert changes, "the profiler saw no allocation"
    now = peak = 0
    for _, nbytes in changes:
        now += nbytes
        peak = max(peak, now)
    return peak
