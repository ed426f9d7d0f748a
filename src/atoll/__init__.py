"""Atoll: one model, many islands of compute that never wait for each other."""

from typing import TYPE_CHECKING, Any

from atoll.version import __version__

if TYPE_CHECKING:
    from atoll.runtime.join.learner import Learner, join

__all__ = ["Learner", "__version__", "join"]


def __getattr__(name: str) -> Any:
    """`atoll.join` brings torch and gRPC with it: whoever only asks for the version does not wait for them."""
    if name in ("Learner", "join"):
        from atoll.runtime.join import learner as join

        return getattr(join, name)
    raise AttributeError(f"module 'atoll' has no attribute {name!r}")
