"""Atoll: one model, many islands of compute that never wait for each other."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from atoll.runtime.join import Learner, join

__version__ = "0.1.0"
__all__ = ["Learner", "__version__", "join"]


def __getattr__(name: str) -> Any:
    """`atoll.join` brings torch and gRPC with it: whoever only asks for the version does not wait for them."""
    if name in ("Learner", "join"):
        from atoll.runtime import join

        return getattr(join, name)
    raise AttributeError(f"module 'atoll' has no attribute {name!r}")
