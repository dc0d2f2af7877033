"""As in the real package of version 2, `EventOverlap` is not here."""

from deep_ep.utils.event import EventHandle  # noqa: F401
