"""Python runs this first in a process that ``python -m tests.ahead`` has begun, and in its children."""

from tests.ahead.pretending import begin_as_told

begin_as_told()
