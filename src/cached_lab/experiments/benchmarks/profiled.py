"""Where the time of one call goes, by operators."""

from __future__ import annotations

from collections.abc import Callable

from torch.profiler import ProfilerActivity, profile

from cached_lab.experiments.reports.markdown import table


def operators(call: Callable[[], object], device: str, count: int = 15) -> str:
    """The operators that take most time themselves, as Markdown: calls, milliseconds, share; on a GPU that of the GPU.

    Args:
        call: what is looked at, after one call that is not. count: rows.
    """
    call()
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device == "cuda" else [])]
    with profile(activities=activities) as seen:
        call()
    kind = f"self_{'device' if device == 'cuda' else 'cpu'}_time_total"
    events = sorted(((getattr(event, kind), event) for event in seen.key_averages()), key=lambda pair: -pair[0])
    total = sum(spent for spent, _ in events) or 1.0
    cells = [
        [event.key, f"{event.count:,}", f"{spent / 1e3:,.1f}", f"{100 * spent / total:.1f} %"]
        for spent, event in events[:count]
    ]
    return table(["operator", "calls", "ms", "share"], cells)
