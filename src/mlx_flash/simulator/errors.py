"""What the simulator raises."""


class SimulatorError(RuntimeError):
    """The kernel does not compile, or it did something that a GPU would not forgive."""
