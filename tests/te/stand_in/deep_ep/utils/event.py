"""Events of the communication stream, of which the CPU has none."""


class EventHandle:
    """A CUDA event."""


class EventOverlap:
    """An event that a stream can wait for."""

    def __init__(self, event: EventHandle | None = None, extra_tensors: object = None) -> None:
        self.event = event

    def current_stream_wait(self, release_handle: bool = False) -> None:
        assert self.event is not None
