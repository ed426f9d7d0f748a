"""A learner that attacks: what it sends is changed on its way out, in virtual time and live alike.

It knows the rules: `size` is how far it goes, so a plan can stay just inside a check or far beyond it. Everything is a function
of the message and the seed.
"""

from __future__ import annotations

from typing import Any

import msgspec
import torch
from torch import Tensor

from atoll.chaos import Hostile
from atoll.codecs import Packet, codec
from atoll.config import Config
from atoll.ids import Nanos, nanos
from atoll.protocol.interface import Payload
from atoll.protocol.vocabulary import Contribution, Envelope, Hello, Lane, Loaded, Report

STEPS = 2**40
NANOS = 2**52
TOKENS = 10**12


class Attacker:
    def __init__(self, config: Config, fault: Hostile) -> None:
        self._codec = codec(config.protocol.codec_up)
        self._seed = config.seed
        self.fault = fault
        self._answers = 0

    def sent(self, envelope: Envelope, payload: Payload | None) -> tuple[Envelope, Payload | None]:
        """What goes out in place of this message."""
        body: Any = envelope.body
        if isinstance(body, Contribution):
            payload = self._poisoned(body, payload)
        changes = _lies(self.fault.attack, body)
        if changes:
            envelope = msgspec.structs.replace(envelope, body=msgspec.structs.replace(body, **changes))
        if self.fault.attack == "clock":
            envelope = msgspec.structs.replace(envelope, clock=2**50)
        return envelope, payload

    def delay(self, envelope: Envelope) -> Nanos:
        """Dawdling: each answer to a pull comes later than the one before, by `size` seconds. Whatever may overtake it, does."""
        if self.fault.attack != "dawdle" or not isinstance(envelope.body, Contribution):
            return 0
        self._answers += 1
        return nanos(self.fault.size * self._answers)

    @staticmethod
    def may_be_held(envelope: Envelope) -> bool:
        """It comes after an answer that is held back, or is one."""
        return envelope.body.lane is Lane.BULK or envelope.after > 0

    def _poisoned(self, body: Contribution, payload: Payload | None) -> Payload | None:
        content = payload.content if payload is not None else None
        if payload is None or not isinstance(content, tuple) or not isinstance(content[0], Packet):
            return payload  # nothing is sent, or no tensor moves in this run
        changed = self._changed(body, self._codec.decode(content[0]))
        if changed is None:
            return payload
        packet = self._codec.encode(changed)
        return Payload(payload.kind, packet.nbytes + 4 * content[1].numel(), (packet, content[1]))

    def _changed(self, body: Contribution, delta: Tensor) -> Tensor | None:
        size = self.fault.size
        match self.fault.attack:
            case "sign_flip":
                return -size * delta
            case "scale":
                return size * delta
            case "free_ride":
                return torch.zeros_like(delta)
            case "drift":  # the same direction every time, as long as its own honest difference
                return self._direction(delta, body.fragment) * (size * float(delta.norm()))
            case "noise":  # another direction every time
                return self._direction(delta, body.fragment + 1000 * body.outer_step) * (size * float(delta.norm()))
            case _:
                return None

    def _direction(self, like: Tensor, salt: int) -> Tensor:
        generator = torch.Generator().manual_seed(self._seed * 1_000_003 + salt)
        direction: Tensor = torch.randn(like.numel(), generator=generator)
        return direction.div_(direction.norm()).to(like.device)


def _lies(attack: str, body: Any) -> dict[str, int]:
    match attack, body:
        case "steps", Hello() | Loaded():
            return {"local_step": body.local_step + STEPS}
        case "steps", Report():
            return {"local_step": body.local_step + STEPS}
        case "steps", Contribution():
            return {"local_step": body.local_step + STEPS, "c_steps": body.local_step + STEPS}
        case "tokens", Contribution():
            return {"c_tokens": min(TOKENS, body.tokens), "c_steps": body.local_step}
        case "times", Report():
            return {"step_nanos": NANOS}
        case _:
            return {}
