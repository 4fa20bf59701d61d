"""Numbers as options.

Owns: NumberRange. Runs in: CLI. Must not know: what is counted.
"""

import math
from typing import Any

import click


class NumberRange(click.FloatRange):
    """A FloatRange without NaN, which lies below no bound and above none, so that click lets it through."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """As FloatRange, with NaN refused."""
        number = float(super().convert(value, param, ctx))
        if math.isnan(number):
            low, high = ("any" if end is None else f"{end:g}" for end in (self.min, self.max))
            self.fail(f"{value} is not a number from {low} to {high}.", param, ctx)
        return number
