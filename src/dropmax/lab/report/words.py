"""What each number of a report means, in a sentence, and how it is written."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["METRICS", "Metric"]


@dataclass(frozen=True)
class Metric:
    """How a metric is shown: its label, unit, factor and digits, and what it means.

    >>> METRICS["error"].show(0.0294), METRICS["nll"].show(0.0971, 0.0069)
    ('2.94 %', '0.0971 ± 0.0069')
    """

    label: str
    factor: float
    digits: int
    unit: str
    meaning: str

    def show(self, value: float, half_width: float | None = None) -> str:
        """Write a value, and the half-width of its interval where there is one."""
        text = f"{self.factor * value:.{self.digits}f}"
        if half_width is not None:
            text += f" ± {self.factor * half_width:.{self.digits}f}"
        return text + self.unit

    def show_difference(self, value: float, half_width: float | None = None) -> str:
        """Write a difference, with its sign."""
        text = f"{self.factor * value:+.{self.digits}f}".replace("-", "−")
        if half_width is not None:
            text += f" ± {self.factor * half_width:.{self.digits}f}"
        return text + (" points" if self.unit else "")


#: By the names of :func:`dropmax.metrics.evaluate`; of every one, less is better.
METRICS: dict[str, Metric] = {
    "error": Metric("error", 100, 2, " %", "How many answers are wrong."),
    "top5_error": Metric("top-5 error", 100, 2, " %", "How often the truth is not among the five likeliest answers."),
    "nll": Metric(
        "NLL",
        1,
        4,
        "",
        "Mean surprise at the truth, in nats: the negative logarithm of the probability it was given. It "
        "punishes being sure and wrong.",
    ),
    "brier": Metric(
        "Brier score",
        1,
        4,
        "",
        "Squared distance of the predicted probabilities from the truth, between 0 and 2: right and sure is best.",
    ),
    "ece": Metric(
        "ECE",
        100,
        2,
        " %",
        "Expected calibration error: how far confidence is from accuracy, on average over 15 bins of confidence.",
    ),
    "aurc": Metric(
        "AURC",
        1,
        5,
        "",
        "Area under the risk-coverage curve: the mean error when the least sure answers are rejected first. It "
        "rewards being unsure exactly where one is wrong.",
    ),
}
