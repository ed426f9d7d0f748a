"""Every parser takes what it should and refuses the rest with its own exceptions, in little memory and time.

Hypothesis searches here, a few seconds in `make test` and minutes in `make soak`. `guided.py` runs the same parsers under a
coverage-guided fuzzer where one is installed.
"""

from __future__ import annotations

import contextlib
import resource
import time
import tracemalloc
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mutations import changed, edited
from parsers import Parser, parsers

EXAMPLES, SOAK_EXAMPLES = 15, 4000
SECONDS_MAX = 5.0
NAMES = sorted(parsers())


def inputs(parser: Parser) -> st.SearchStrategy[bytes]:
    kinds: list[st.SearchStrategy[bytes]] = [st.binary(max_size=200)]
    if parser.seeds:
        kinds.append(edited(parser.seeds))
    if parser.trees:
        kinds.append(changed(parser.trees).map(lambda tree: encoded(parser, tree)))
    return st.one_of(kinds)


def encoded(parser: Parser, tree: object) -> bytes:
    try:
        return parser.build(tree)
    except (OverflowError, TypeError, ValueError, AttributeError):  # not a value that this format can hold
        return b""


def warm(parser: Parser) -> None:
    """The first calls import, compile and cache, which is no memory of their input's. While traced, compiling takes long, and
    so does Hypothesis's table of all characters, which a new checkout has not stored yet."""
    tracemalloc.stop()
    st.text().validate()
    for data in (b"", *parser.seeds):
        with contextlib.suppress(*parser.refusals):
            parser.parse(data)
    tracemalloc.start(1)


def feed(parser: Parser, data: bytes) -> bool:
    """True: taken. Raises what is no refusal."""
    tracemalloc.reset_peak()
    before, resident, began = tracemalloc.get_traced_memory()[0], resident_most(), time.process_time()
    try:
        parser.parse(data)
        return True
    except parser.refusals:
        return False
    finally:
        seconds, more_resident = time.process_time() - began, resident_most() - resident
        grown = tracemalloc.get_traced_memory()[1] - before
        assert grown < (8 << 20) + 200 * len(data), f"{grown} bytes of memory for {len(data)} bytes"
        assert more_resident < 200_000, f"{more_resident} kB of memory, tensors included"
        assert seconds < SECONDS_MAX


def resident_most() -> int:
    """In kB, since the process began. Read around one parse alone: Hypothesis takes hundreds of megabytes for itself."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def search(parser: Parser, examples: int) -> None:
    @settings(max_examples=examples, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(inputs(parser))
    def every(data: bytes) -> None:
        feed(parser, data)

    warm(parser)
    every()


@pytest.fixture(autouse=True)
def traced() -> Iterator[None]:
    tracemalloc.start(1)
    yield
    tracemalloc.stop()


@pytest.mark.parametrize("name", NAMES)
def test_parser_takes_its_own_examples(name: str) -> None:
    """Or the search would only ever see refusals."""
    parser = parsers()[name]
    warm(parser)
    assert all(feed(parser, seed) for seed in parser.seeds)
    assert all(feed(parser, parser.build(tree)) for tree in parser.trees)


@pytest.mark.parametrize("name", NAMES)
def test_parser_refuses_what_is_wrong_with_its_own_exceptions(name: str) -> None:
    search(parsers()[name], EXAMPLES)


DEEP = {"json": b"[" * 100_000, "toml": b"x = " + b"[" * 100_000, "digits": b"x = " + b"9" * 99_999, "msgpack": b"\x91" * 100_000}


@pytest.mark.parametrize("what", DEEP)
@pytest.mark.parametrize("name", NAMES)
def test_parser_survives_endless_nesting_and_numbers(name: str, what: str) -> None:
    warm(parsers()[name])
    feed(parsers()[name], DEEP[what])


@pytest.mark.soak
@pytest.mark.parametrize("name", NAMES)
def test_parser_refuses_what_is_wrong_for_minutes(name: str) -> None:
    search(parsers()[name], SOAK_EXAMPLES)
