"""A tape as text: one line of fixed width per event, for reading, diffs and transcripts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from atoll.ids import seconds, worker_name
from atoll.protocol.reasons import Why
from atoll.protocol.vocabulary import (
    AbortRound,
    Accept,
    Adopt,
    Announce,
    AnswerRollback,
    Connected,
    ConnectionLost,
    Contribution,
    DeadlinePassed,
    Discard,
    Effect,
    Enter,
    Event,
    Finished,
    FixParticipants,
    Hello,
    InnerStep,
    LoadState,
    LoadTheta,
    Membership,
    Merge,
    Message,
    Poisoned,
    Pull,
    Received,
    RecordState,
    RecordSyncer,
    Recovered,
    Refuse,
    Reissue,
    Report,
    Resized,
    Resume,
    SealSnapshot,
    Send,
    Stage,
    Standing,
    Started,
    StateTransfer,
    StepDone,
    Store,
    Stored,
    Tick,
    Ticket,
    Wait,
)  # fmt: skip
from atoll.tape.format import Record

WIDTH = 160


def strip_lines(records: Iterable[Record]) -> Iterator[str]:
    for r in records:
        yield strip_line(r)


def strip_line(r: Record) -> str:
    effects = "; ".join(text for text in map(effect_word, r.effects) if text)
    line = f"{r.number:>7} {seconds(r.now):>12.4f} {worker_name(r.worker):<10} {event_word(r.event):<44} {effects}"
    return line if len(line) <= WIDTH else line[: WIDTH - 1] + "…"


def event_word(event: Event) -> str:
    match event:
        case Received(envelope=e):
            return f"< {worker_name(e.sender)} {message_word(e.body)}"
        case StepDone():
            return "step done"
        case Stored(outer_step=t):
            return f"stored {t}"
        case Started(incarnation=i):
            return f"started, incarnation {i}"
        case Connected(peer=p):
            return f"connected {worker_name(p)}"
        case ConnectionLost(peer=p):
            return f"lost {worker_name(p)}"
        case DeadlinePassed():
            return "deadline"
        case Poisoned(where=where):
            return f"poisoned: {where}"
        case Resized(share=share):
            return f"resized to {share:.1%}"
        case _:
            return type(event).__name__


def message_word(body: Message) -> str:
    match body:
        case Report(local_step=s, position=q):
            return f"report {s} at {q}"
        case Contribution(outer_step=t, fragment=p, local_step=s):
            return f"fragment {p} for {t} of {s}"
        case Announce(outer_step=t, fragment=p):
            return f"announce {p}@{t}"
        case Pull(outer_step=t, fragments=fragments):
            return f"pull {_few(fragments)} for {t}"
        case Tick(outer_step=t):
            return f"tick {t}"
        case Enter(outer_step=t):
            return f"enter at {t}"
        case Hello(needs_state=needs):
            return "hello" + (", needs state" if needs else "")
        case Ticket(peer=peer):
            return f"ticket for {worker_name(peer)}"
        case StateTransfer():
            return "state"
        case _:
            return type(body).__name__.lower()


def effect_word(effect: Effect) -> str:
    match effect:
        case Send(envelope=e):
            return "" if isinstance(e.body, Report | Announce | Tick) else f"> {worker_name(e.receiver)} {message_word(e.body)}"
        case FixParticipants(outer_step=t, participants=who, fragments=due):
            return f"round {t} {_few(due)} by {_few(who)}"
        case Merge(outer_step=t, fragment=p, shares=shares):
            return f"merge {p}@{t} of {len(shares)}"
        case Adopt(fragment=p, version=v):
            return f"adopt {p}@{v}"
        case Membership(learner=m, standing=Standing.LOST, reason=reason) if reason.why is Why.RUN_OVER:
            return f"learner{m} has ended"
        case Membership(learner=m, standing=standing):
            return f"learner{m} is {standing}"
        case Wait(reason=reason):
            return f"waits: {reason}"
        case Resume(waited_nanos=n):
            return f"resumes after {seconds(n):.3f} s"
        case AbortRound(outer_step=t, reason=reason):
            return f"round {t} again: {reason}"
        case AnswerRollback(reason=reason):
            return str(reason)
        case Discard(outer_step=t, learner=m, reason=reason):
            return f"learner{m} out of {t}: {reason}"
        case Recovered(learner=m, source=source):
            return f"learner{m} recovered from {worker_name(source)}"
        case Refuse(reason=reason):
            return f"refuse: {reason}"
        case SealSnapshot(snapshot=t, complete=complete):
            return f"snapshot {t} {'sealed' if complete else 'abandoned'}"
        case RecordState(snapshot=t) | RecordSyncer(snapshot=t):
            return f"record {t}"
        case Reissue(units=units):
            return f"re-issue {len(units)} units"
        case Accept() | InnerStep() | Stage() | Store():
            return ""
        case LoadState() | LoadTheta() | Finished():
            return type(effect).__name__.lower()
        case _:
            return ""


def _few(items: tuple[int, ...]) -> str:
    return "{" + (",".join(map(str, items)) if len(items) <= 6 else f"{items[0]}..{items[-1]}") + "}"
