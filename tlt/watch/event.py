"""What every event is: a record of plain values."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Event:
    """What every event is: a record of plain values."""
