"""Parameters of the case study's generator."""

from __future__ import annotations

import dataclasses
import datetime as dt
from dataclasses import dataclass

from python_jobs.shared.core.dates import parse_date
from python_jobs.shared.core.failures import WrongUse, require_at_least
from python_jobs.shared.core.intervals import duration, moved


@dataclass(frozen=True)
class Parameters:
    """Generate the case study's landing files.

    Each share, from 0 to 1, is the part of the rows with one imperfection; with 0 the imperfection doesn't occur.
    """

    output: str
    """Landing folder (path or URI) for the feeds and truth.json."""
    visits: int = 200_000
    """Number of page events, without duplicates and corrections."""
    users: int | None = None
    """Number of users; by default one for each 100 visits, and at least 100."""
    days: int = 3
    """Number of days."""
    start: str = "2024-03-01"
    """First day, as YYYY-MM-DD (UTC)."""
    seed: int = 42
    """Seed of the pseudo-random values; the same seed and parameters give the same bytes."""
    unparsable_share: float = 0.01
    """Visits whose line is not JSON: garbage, or cut in the middle. In the other feeds: additional lines."""
    missing_field_share: float = 0.01
    """Visits whose user_id, page or context is absent or null."""
    wrong_type_share: float = 0.01
    """Visits with a number, text or object in a field of another type; some of them are usable."""
    exact_duplicate_share: float = 0.02
    """Visits and user changes that come again with the same bytes, in the same or a later folder."""
    corrected_share: float = 0.01
    """Visits that come again with the same key and another payload, in the same or a later folder."""
    late_share: float = 0.03
    """Visits that land one or more folders after their hour; with 0 no user change is late, either."""
    unknown_user_share: float = 0.01
    """Visits of a user_id that no feed of users has."""
    null_key_share: float = 0.005
    """Visits whose visit_id or event_time is absent or null. In the other feeds: additional lines without key."""
    awkward_text_share: float = 0.02
    """Visits and logins with non-ASCII characters, quotes, backslashes, tabs and line ends."""
    probe_share: float = 0.02
    """Visits of monitoring probes, whose page starts with healthcheck."""
    overwrite: bool = False
    """Whether the feeds and truth.json of an earlier run are replaced; other files in the folder stay."""

    def __post_init__(self) -> None:
        require_at_least(1, visits=self.visits, users=self.users, days=self.days)
        for name in (option.name for option in dataclasses.fields(self) if option.name.endswith("_share")):
            if not 0 <= getattr(self, name) <= 1:
                raise WrongUse(f"--{name} is {getattr(self, name)}, but must be between 0 and 1")
        try:
            parse_date(self.start)
        except ValueError:
            raise WrongUse(f"--start is '{self.start}', but must be a day written YYYY-MM-DD") from None

    @property
    def user_count(self) -> int:
        """Return the number of users: the parameter, or by default one for each 100 visits and at least 100."""
        return max(100, self.visits // 100) if self.users is None else self.users

    @property
    def hours(self) -> int:
        """Return the number of hours of all days."""
        return self.days * 24

    @property
    def start_ms(self) -> int:
        """Return midnight of the first day, in milliseconds since the epoch."""
        midnight = dt.datetime.combine(parse_date(self.start), dt.time(), dt.UTC)
        return int(midnight.timestamp()) * 1000

    def day_name(self, day: int) -> str:
        """Return a day as YYYY-MM-DD, given its number from 0."""
        return moved(parse_date(self.start), duration("days", day)).isoformat()

    def hour_name(self, hour: int) -> str:
        """Return an hour as YYYY-MM-DDTHH, given its number from 0."""
        return f"{self.day_name(hour // 24)}T{hour % 24:02d}"

    @property
    def day_folders(self) -> list[str]:
        """Return the landing folders of a daily feed."""
        return [f"date={self.day_name(day)}" for day in range(self.days)]

    @property
    def hour_folders(self) -> list[str]:
        """Return the landing folders of an hourly feed."""
        return [f"{day}/hour={hour:02d}" for day in self.day_folders for hour in range(24)]
