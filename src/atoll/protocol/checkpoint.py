"""A machine's state as bytes, and back: what a restart loads in place of the events that led there.

A machine is a graph of *parts* (objects of this room's classes, which change) that hold *values* (numbers, containers, enums and
frozen Structs). What is wired when a machine is built (the config, functions of it) is the same in every machine of a config:
it is not written, and a new machine keeps its own.

The walk is over attributes, so a field that somebody adds to a part is in the next checkpoint without a line here. What the walk
does not know is refused when it is written. Bytes name only classes of this room, and only those are ever made from them.
"""

from __future__ import annotations

import sys
from collections import OrderedDict, deque
from enum import Enum
from types import FunctionType, MethodType
from typing import Any, NamedTuple, TypeVar

import msgspec

from atoll.config import Config
from atoll.errors import UNDECODABLE, TapeError
from atoll.ids import Incarnation, OuterStep, WorkerId
from atoll.protocol.learner import LearnerMachine
from atoll.protocol.syncer import SyncerMachine
from atoll.rules import Schedule

ROOM = "atoll.protocol."
PLAIN = (type(None), bool, int, float, str)

MachineT = TypeVar("MachineT")


class Checkpoint(NamedTuple):
    """A machine between two events, and what a reader must know to begin there."""

    state: bytes
    incarnation: Incarnation
    outer_step: OuterStep
    sent: tuple[tuple[WorkerId, int, int], ...]
    """By receiver: the messages that this incarnation has sent, in either lane."""


def checkpoint(machine: SyncerMachine | LearnerMachine) -> Checkpoint:
    outer_step = machine.outer_step if isinstance(machine, SyncerMachine) else machine.outer_known
    mailbox = machine.mailbox
    return Checkpoint(freeze(machine), mailbox.incarnation, outer_step, mailbox.sent())


class Unusable(TapeError):
    """These bytes are no state of a machine of this version of Atoll."""


def freeze(machine: Any) -> bytes:
    """The state of a machine between two events."""
    return msgspec.msgpack.encode(_Writer(machine).parts)


def thaw(state: bytes, machine: MachineT) -> MachineT:
    """`machine`: a new one of the same config and worker. It becomes the one that was frozen."""
    try:
        parts = msgspec.msgpack.decode(state, type=list[tuple[str, dict[str, Any], list[tuple[Any, Any]]]])
        _Reader(parts).fill(machine)
    except UNDECODABLE as error:
        raise Unusable(f"the checkpoint cannot be read: {error}") from None
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise Unusable(f"the checkpoint is not of this version of Atoll ({type(error).__name__}: {error})") from None
    return machine


class _Writer:
    def __init__(self, machine: Any) -> None:
        self.parts: list[tuple[str, dict[str, Any], list[tuple[Any, Any]]]] = []
        self._numbers: dict[int, int] = {}
        self._part(machine)

    def _part(self, part: Any) -> int:
        if id(part) in self._numbers:
            return self._numbers[id(part)]
        number = self._numbers[id(part)] = len(self.parts)
        attributes: dict[str, Any] = {}
        items: list[tuple[Any, Any]] = []
        self.parts.append((_name(type(part)), attributes, items))
        attributes.update((name, self._value(value)) for name, value in _attributes(part).items())
        if isinstance(part, dict):
            items.extend((self._value(key), self._value(value)) for key, value in part.items())
        return number

    def _value(self, value: Any) -> Any:
        kind = type(value)
        if kind in PLAIN:
            return value
        if kind in _CONTAINERS:
            return [_CONTAINERS[kind], *map(self._value, sorted(value) if kind in (set, frozenset) else value)]
        if kind is deque:
            return ["deque", value.maxlen, *map(self._value, value)]
        if kind in (dict, OrderedDict):
            return ["map" if kind is dict else "ordered", *([self._value(k), self._value(v)] for k, v in value.items())]
        if kind is FunctionType or isinstance(value, (Schedule, Config)) or kind.__module__.startswith("atoll.config"):
            return ["wired"]
        if kind is MethodType:
            return ["method", self._part(value.__self__), value.__name__]
        if isinstance(value, Enum):
            return ["enum", _name(kind), value.value]
        if isinstance(value, msgspec.Struct):
            return ["struct", _name(kind), *(self._value(getattr(value, f)) for f in kind.__struct_fields__)]
        if isinstance(value, tuple):
            return ["named", _name(kind), *map(self._value, value)]
        if kind.__module__.startswith(ROOM):
            return ["part", self._part(value)]
        raise TypeError(f"{kind.__module__}.{kind.__qualname__} cannot be part of a machine's state")


class _Reader:
    def __init__(self, parts: list[tuple[str, dict[str, Any], list[tuple[Any, Any]]]]) -> None:
        self._specs = parts
        self._classes = _classes()
        self._parts: dict[int, Any] = {}

    def fill(self, machine: Any) -> None:
        self._find(0, machine)
        for number, (name, _, _) in enumerate(self._specs):
            if number not in self._parts:
                self._parts[number] = object.__new__(self._classes[name])
        for number, spec in enumerate(self._specs):
            self._fill(self._parts[number], spec)

    def _find(self, number: int, part: Any) -> None:
        """Parts that a new machine has already are filled and not made: others hold on to them."""
        name, attributes, _ = self._specs[number]
        if _name(type(part)) != name or number in self._parts:
            return
        self._parts[number] = part
        there = _attributes(part)
        if set(attributes) != set(there):
            raise ValueError(f"{name} has other fields: {', '.join(sorted(set(attributes) ^ set(there)))}")
        for attribute, value in attributes.items():
            if isinstance(value, list) and value[0] == "part":
                self._find(value[1], there[attribute])

    def _fill(self, part: Any, spec: tuple[str, dict[str, Any], list[tuple[Any, Any]]]) -> None:
        _, attributes, items = spec
        for name, value in attributes.items():
            if value != ["wired"]:
                setattr(part, name, self._value(value))
            elif not hasattr(part, name):
                raise ValueError(f"{type(part).__name__}.{name} is not there to keep")
        if isinstance(part, dict):
            part.clear()
            part.update((self._value(key), self._value(value)) for key, value in items)

    def _value(self, value: Any) -> Any:
        if not isinstance(value, list):
            return value
        tag, rest = value[0], value[1:]
        if tag in _MADE_BY:
            return _MADE_BY[tag](map(self._value, rest))
        if tag == "deque":
            return deque(map(self._value, rest[1:]), maxlen=rest[0])
        if tag in ("map", "ordered"):
            pairs = ((self._value(k), self._value(v)) for k, v in rest)
            return dict(pairs) if tag == "map" else OrderedDict(pairs)
        if tag == "part":
            return self._parts[rest[0]]
        if tag == "method":
            return self._method(*rest)
        kind, arguments = self._classes[rest[0]], rest[1:]
        if tag == "enum" and issubclass(kind, Enum):
            return kind(arguments[0])
        if (tag == "struct" and issubclass(kind, msgspec.Struct)) or (tag == "named" and issubclass(kind, tuple)):
            return kind(*map(self._value, arguments))
        raise ValueError(f"{tag} of {rest[0]}")

    def _method(self, number: int, name: str) -> Any:
        method = getattr(self._parts[number], name)
        if not isinstance(method, MethodType):
            raise ValueError(f"{name} is no method")
        return method


_CONTAINERS: dict[type, str] = {list: "list", tuple: "tuple", set: "set", frozenset: "frozen"}
_MADE_BY = {tag: kind for kind, tag in _CONTAINERS.items()}


def _attributes(part: Any) -> dict[str, Any]:
    slots = [name for kind in type(part).__mro__ for name in getattr(kind, "__slots__", ())]
    return {name: getattr(part, name) for name in slots if hasattr(part, name)} | getattr(part, "__dict__", {})


def _name(kind: type) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"


def _classes() -> dict[str, type]:
    """Of this room, and what a round keeps of the rules."""
    modules = [module for name, module in sys.modules.items() if name.startswith(ROOM) or name == "atoll.rules"]
    return {_name(kind): kind for module in modules for kind in vars(module).values() if isinstance(kind, type)}
