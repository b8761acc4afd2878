"""How random calls are drawn, and from what: lengths, limits, sets of features."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from hypothesis import HealthCheck, given, settings
from hypothesis import seed as hypothesis_seed
from hypothesis import strategies as st

T = TypeVar("T")

FEATURES = (
    "", "causal", "window", "softcap", "sinks", "causal softcap sinks", "window sinks", "window softcap",
)  # fmt: skip
"""Sets of features that each head size and family meets in one of the element types."""

LENGTHS = st.one_of(
    st.integers(0, 5), st.integers(6, 140), st.sampled_from((63, 64, 65, 127, 128, 129, 255, 256, 257, 400))
)
MANY_KEYS = st.one_of(LENGTHS, st.integers(500, 3000))
PAGE_SIZES = st.sampled_from((16, 32, 48, 64, 80, 128, 208, 256, 400))  # Hopper kernels take multiples of 16
LIMITS = st.one_of(
    st.none(), st.integers(0, 9), st.integers(10, 300), st.integers(-9, -1), st.integers(-300, -10)
)
OFFSETS = st.one_of(st.just(0), st.integers(-9, 9), st.integers(-300, 300))
SCALES = (None, None, 0.0, 0.05, 1.0, -0.3)


def for_each(source: st.SearchStrategy[T], n: int, seed: int, check: Callable[[T], object]) -> None:
    """Hands n values, drawn from the seed, to a function; makes one small for which it raises, and raises."""

    def checked(value: T) -> None:
        check(value)

    profile = settings(
        max_examples=n,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        print_blob=False,
        report_multiple_bugs=False,
    )
    hypothesis_seed(seed)(profile(given(source)(checked)))()
