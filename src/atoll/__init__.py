"""Atoll: one model on many learners that never wait for each other."""

from typing import TYPE_CHECKING, Any

from atoll.version import __version__

if TYPE_CHECKING:
    from atoll.extend import CodecSpec, MergeSpec, register_codec, register_merge
    from atoll.runtime.join.joining import join
    from atoll.runtime.join.learner import Learner

__all__ = ["CodecSpec", "Learner", "MergeSpec", "__version__", "join", "register_codec", "register_merge"]

_EXTENDING = ("CodecSpec", "MergeSpec", "register_codec", "register_merge")


def __getattr__(name: str) -> Any:
    """Imported when first asked for: torch and gRPC take seconds, and the version needs neither."""
    if name == "join":
        from atoll.runtime.join.joining import join

        return join
    if name == "Learner":
        from atoll.runtime.join.learner import Learner

        return Learner
    if name in _EXTENDING:
        from atoll import extend

        return getattr(extend, name)
    raise AttributeError(f"module 'atoll' has no attribute {name!r}")
