"""Progress lines of a training run."""

import resource
import sys
import time

import torch

from ...checkpoints.storage.messages import escape_control
from ...checkpoints.storage.redaction import redacted

_SECONDS_BETWEEN_LINES = 15.0


class Report:
    """Progress report with steps, loss, tokens per second and remaining time. Prints nothing if not `active`."""

    def __init__(self, name: str, steps: int, first_step: int, active: bool) -> None:
        self._name, self._steps, self._first_step, self._active = name, steps, first_step, active
        self._last_line, self._seconds = -_SECONDS_BETWEEN_LINES, 0.0

    def line(self, text: str) -> None:
        if self._active:
            print(escape_control(redacted(text)), file=sys.stderr)

    def step(self, step: int, loss: float, tokens_per_second: float, seconds: float) -> None:
        """Print step, loss, tokens per second and remaining time, at most every 15 seconds."""
        self._seconds += seconds  # evaluations are excluded from the estimate of the remaining time
        if time.monotonic() - self._last_line >= _SECONDS_BETWEEN_LINES or step == self._steps:
            self._last_line = time.monotonic()
            left = self._seconds / (step - self._first_step) * (self._steps - step)
            now = f"loss {loss:.4f} · {tokens_per_second:,.0f} tokens/s"
            self.line(f"{self._name}: step {step} of {self._steps} · {now} · {left:.0f} s left")

    def evaluation(self, step: int, metrics: dict[str, float]) -> None:
        """Print the metrics measured after `step` steps."""
        if metrics:
            values = " · ".join(f"{name} {value:.4g}" for name, value in metrics.items())
            self.line(f"{self._name}: evaluation after step {step}: {values}")


def peak_memory(device: torch.device) -> int:
    """Return the peak memory use of this process in bytes: GPU memory for a GPU, otherwise host memory."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
