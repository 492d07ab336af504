"""The engines that tests share, and a shell that is connected to them."""

from tests.cluster.engines import gate, here, machine

__all__ = ["gate", "here", "machine"]
